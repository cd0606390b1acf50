"""Text sources, tokenizers, token files and batches."""
