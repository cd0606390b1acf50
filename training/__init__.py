"""The parts that the training story in train.py names."""
