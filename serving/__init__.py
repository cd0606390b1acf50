"""What `sample.py` is made of: its command line, its prompts, what it prints."""
