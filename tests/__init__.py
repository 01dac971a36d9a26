"""The test suite: one file a module, then the chain of the three scripts."""
