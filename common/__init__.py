"""What two or more of the three scripts share.

The files stand on floors: each imports only from those above it (pyproject.toml, import-linter).
"""
