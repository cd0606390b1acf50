"""Train the settings in a JSON file, on as many ranks as torchrun starts.

Usage: torchrun --nproc-per-node N train_settings.py SETTINGS.json
"""

import json
import sys
from pathlib import Path

from train import train
from training.config import from_dict

if __name__ == "__main__":
    train(from_dict(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), [])
