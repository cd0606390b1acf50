"""Hydra configuration files; a package only so that an installed glassgpt carries them."""
