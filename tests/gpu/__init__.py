"""What only a GPU can show; collected only where CUDA is."""
