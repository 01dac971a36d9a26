"""What `make demo` needs: a tiny target, its tokenizer, its completions, and the driver."""
