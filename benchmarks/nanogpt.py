"""nanoGPT as the peer of the benchmarks: its own files, unmodified, in a temporary folder.

The recipe is the one that nanoGPT's README gives for a CPU: characters, 4 layers, 4 heads, width
128, context 64, 12 sequences a step, 2,000 steps, no dropout, not compiled.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import pickle
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from data.prepare import Prepared

FILES = ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py")
DATASET = "shakespeare_char"
OUTPUT = "out"
CONTEXT = 64
BATCH = 12
TOKENS_PER_STEP = BATCH * CONTEXT
RECIPE = (
    "config/train_shakespeare_char.py",
    "--device=cpu",
    "--compile=False",
    "--log_interval=1",
    f"--block_size={CONTEXT}",
    f"--batch_size={BATCH}",
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--dropout=0.0",
    "--lr_decay_iters=2000",
    f"--out_dir={OUTPUT}",
)


class NanoGPT:
    """A working copy of a nanoGPT checkout with our text prepared for it.

    Args:
        checkout: the folder that holds nanoGPT's train.py.
        folder: an empty folder to work in.
        text: token files whose ids the peer trains on as well.

    Raises:
        FileNotFoundError: `checkout` lacks a file of nanoGPT.
    """

    def __init__(self, checkout: Path, folder: Path, text: Prepared) -> None:
        self.folder = folder
        for name in FILES:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checkout / name, target)
        data = folder / "data" / DATASET
        data.mkdir(parents=True)
        for tokens in (text.train, text.val):
            ids = tokens.read(0, len(tokens)).astype(np.uint16)
            ids.tofile(data / f"{tokens.provenance.split}.bin")
        meta = {"vocab_size": text.tokenizer.vocab_size}
        (data / "meta.pkl").write_bytes(pickle.dumps(meta))

    def step_seconds(self, steps: int, *, evaluation_batches: int = 1) -> list[float]:
        """Train for `steps` steps and return how long each took, as nanoGPT itself reports.

        It evaluates before step 0 and counts that in its time, so the first entry is replaced by
        the median of the others. It evaluates and saves once more at the end, after the steps
        that are returned. `evaluation_batches` shifts the random stream that batches are drawn
        from, which is the only way to another random state that nanoGPT's flags offer.
        """
        command = [
            sys.executable,
            "-W",
            "ignore",
            "train.py",
            *RECIPE,
            f"--max_iters={steps}",
            f"--eval_interval={steps}",
            f"--eval_iters={evaluation_batches}",
        ]
        result = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"nanoGPT failed:\n{result.stderr[-2000:]}")
        printed = re.findall(r"^iter \d+: loss [\d.]+, time ([\d.]+)ms", result.stdout, re.M)
        seconds = [float(milliseconds) / 1000 for milliseconds in printed[:steps]]
        return [statistics.median(seconds[1:]), *seconds[1:]]

    def loss(self, text: Prepared) -> float:
        """Return the loss of the saved weights over the whole validation split.

        In nats per token, over windows of 64 tokens without overlap, computed by nanoGPT's own
        model.py.
        """
        saved = torch.load(self.folder / OUTPUT / "ckpt.pt", weights_only=True)
        source = load_module(self.folder / "model.py")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            model = source.GPT(source.GPTConfig(**saved["model_args"]))
        model.load_state_dict(saved["model"])
        return whole_split_loss(model.eval(), text)


@torch.no_grad()
def whole_split_loss(model: torch.nn.Module, text: Prepared) -> float:
    """Return nats per token of a nanoGPT model over all whole windows of the validation split."""
    ids = torch.from_numpy(text.val.read(0, len(text.val)).astype(np.int64))
    n_windows = (len(ids) - 1) // CONTEXT
    tokens = ids[: n_windows * CONTEXT].view(n_windows, CONTEXT)
    targets = ids[1 : n_windows * CONTEXT + 1].view(n_windows, CONTEXT)
    nats = 0.0
    for rows, wanted in zip(tokens.split(128), targets.split(128), strict=True):
        logits, _ = model(rows, wanted)  # (B, T, V); without targets it gives the last row alone
        nats += F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum").item()
    return nats / targets.numel()


def load_module(path: Path) -> Any:
    """Import a file under a name of its own: our package is called `model` too."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
