"""`make demo`: fine-tune SmolLM2-135M on two CPU stages, repeat the steps on one device, and compare.

Model and text come from a PyPI package and from the running Python's standard library. The runs are those of
`demo.yaml`; everything lands under `build/demo`. Without network a small Llama is trained from scratch instead.
The stages need about 10 GB of memory together, the comparison on one device about 13 GB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMAND = [sys.executable, "-m", "lightning_seq1f1b"]
SMALL_MODEL_OPTIONS = ["--model.learning_rate=1e-3", "--trainer.limit_train_batches=8", "--trainer.max_epochs=3"]
PROMPT = 'The "with" statement is used to'
TOLERANCE = 1e-3
"""Losses near 2 in float32, summed in another order, differ by 1e-6; weights that drift apart soon differ by more."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo; options that it does not know go to both `fit` commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/demo"), help="where everything goes")
    parser.add_argument("--small", action="store_true", help="train the small Llama, as without network")
    arguments, options = parser.parse_known_args(argv)
    started = time.perf_counter()
    sys.path.insert(0, str(HERE))
    from demo_model import fetch_smollm2, make_small_llama
    from demo_text import write_text

    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    texts = write_text(folder)
    try:
        if arguments.small:
            raise OSError("--small was given")
        model = fetch_smollm2(folder)
    except OSError as error:
        print(f"SmolLM2-135M is not at hand ({error}).")
        print("Training a small Llama FROM SCRATCH on the same text instead: its losses start near ln(8192) = 9.0.")
        model = make_small_llama(folder, texts)
        options = [*SMALL_MODEL_OPTIONS, *options]

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    print("\n== Two pipeline stages, one process each ==", flush=True)
    fit(folder, "pipeline", model, options, threads=max(1, cores // 2))
    print("\n== The same steps on one device ==", flush=True)
    alone = ["--trainer.strategy=auto", "--trainer.devices=1", "--trainer.enable_checkpointing=false"]
    fit(folder, "single", model, [*options, *alone], threads=cores, checkpoint=False)

    from demo_table import Run, table

    pipeline, single = Run.read(folder / "pipeline"), Run.read(folder / "single")
    print(f"\n{table(pipeline, single, model)}\n", flush=True)
    show_checkpoint(folder, Path(pipeline.ranks[0]["checkpoint"]))
    print(f"\nDone in {time.perf_counter() - started:.0f} s.")
    if max(abs(a - b) for a, b in zip(pipeline.losses, single.losses, strict=True)) > TOLERANCE:
        sys.exit(f"The losses of the two runs differ by more than {TOLERANCE}: something is wrong.")


def fit(folder: Path, name: str, model: Path, options: Sequence[str], threads: int, *, checkpoint: bool = True) -> None:
    """Run `lightning-seq1f1b fit` with `demo.yaml`; `folder / name` gets what each rank recorded."""
    shutil.rmtree(folder / name, ignore_errors=True)
    files = [str(folder / "text" / "topics.txt"), str(folder / "text" / "*.txt")]
    command = [
        *COMMAND,
        "fit",
        f"--config={HERE / 'demo.yaml'}",
        f"--trainer.callbacks{'+=' if checkpoint else '='}demo_recorder.StepRecorder",
        f"--trainer.callbacks.directory={folder / name}",
        f"--trainer.logger.save_dir={folder}",
        f"--model.model_name_or_path={model}",
        f"--data.tokenizer={model}",
        f"--data.files={files}",
        *options,
    ]
    search = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    # Everything is on this machine by now, so the hub need not be asked whether it has something newer.
    environment = {"PYTHONPATH": search, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env={**os.environ, **environment}, check=True)


def show_checkpoint(folder: Path, checkpoint: Path) -> None:
    """Export the checkpoint to a Hugging Face directory, load it back, and let it go on with a prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = folder / "exported"
    shutil.rmtree(exported, ignore_errors=True)
    subprocess.run([*COMMAND, "export", f"--checkpoint={checkpoint}", f"--output={exported}"], check=True)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    print(
        f"AutoModelForCausalLM.from_pretrained loads it: {type(model).__name__}, {model.num_parameters():,} parameters"
    )
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    print(f"Greedy continuation: {tokenizer.decode(output[0], skip_special_tokens=True)!r}")


if __name__ == "__main__":
    main()
