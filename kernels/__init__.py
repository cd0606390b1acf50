"""Attention as a function: what it means, and how it runs fast."""
