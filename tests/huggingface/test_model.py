"""Our GPT in transformers: the same logits and loss, exact reload, and generation that equals the full pass."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import stickymoe.huggingface  # noqa: F401
from stickymoe.errors import ConfigError, StickyError
from stickymoe.huggingface.model import GenerationCache, StickyMoEConfig, StickyMoEForCausalLM
from stickymoe.models.gpt import GPT
from stickymoe.runs.config import ModelConfig
from stickymoe.runs.settings import config_from
from stickymoe.training.build import build_model

VOCAB = 23
SIZES = ModelConfig(d_model=16, n_layers=2, n_heads=2, n_experts=5, top_k=2, d_ff=12, seq_len=24)
VARIANTS = ["vanilla", "soft", "smooth", "hysteresis", "residency", "siblings", "delta", "hash+lookup", "dense"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@cache
def pair(variant: str, *, share_block: int = 1) -> tuple[GPT, StickyMoEForCausalLM]:
    """A GPT with large random weights, so that errors show, and the same weights in transformers. Not to be trained."""
    config = replace(config_from({"variant": {"name": variant}}), model=replace(SIZES, share_block=share_block))
    ours = build_model(config, VOCAB).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.4 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    theirs = StickyMoEForCausalLM(StickyMoEConfig.of_run(config, VOCAB)).double()
    theirs.gpt.load_state_dict(ours.state_dict())
    return ours.eval().requires_grad_(False), theirs.eval().requires_grad_(False)


def random_tokens(seed: int, B: int, T: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (B, T), generator=torch.Generator().manual_seed(seed))


def assert_close(given: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-9)


# Logits and loss


@every_variant
def test_logits_are_those_of_the_gpt(variant):
    ours, theirs = pair(variant)
    tokens = random_tokens(0, 3, SIZES.seq_len)
    assert torch.equal(theirs(tokens).logits, ours(tokens).logits)


@every_variant
def test_padding_on_the_right_changes_no_real_token(variant):
    ours, theirs = pair(variant)
    tokens, mask = random_tokens(1, 2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    logits = theirs(tokens, attention_mask=mask).logits
    assert_close(logits[1, :5], ours(tokens[1:, :5]).logits[0])
    assert_close(logits[0], ours(tokens[:1]).logits[0])


@every_variant
def test_the_loss_is_the_cross_entropy_of_the_next_token(variant):
    ours, theirs = pair(variant)
    tokens = random_tokens(2, 2, 12)
    labels = tokens.clone()
    labels[0, :4] = labels[1, 10:] = -100
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    expected = ours(tokens, targets).loss
    out = theirs(tokens, labels=labels)
    torch.testing.assert_close(out.loss.double(), expected, rtol=1e-5, atol=0)
    assert torch.equal(out.logits, ours(tokens).logits)
    loss, logits = theirs(tokens, labels=labels, return_dict=False)
    assert torch.equal(loss, out.loss)
    assert torch.equal(logits, out.logits)


def test_the_loss_is_divided_by_the_labels_of_the_whole_batch():
    """As the Trainer asks for when it accumulates gradients."""
    _, theirs = pair("vanilla")
    tokens = random_tokens(2, 2, 12)
    mean = theirs(tokens, labels=tokens).loss
    torch.testing.assert_close(theirs(tokens, labels=tokens, num_items_in_batch=44).loss, mean / 2)


def test_gradients_reach_every_weight():
    model = StickyMoEForCausalLM(StickyMoEConfig(vocab_size=VOCAB, model={"n_layers": 2, "seq_len": 32, "d_ff": 8}))
    tokens = random_tokens(3, 4, 32)
    model(tokens, labels=tokens).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


# Saving and loading


@every_variant
def test_a_saved_model_is_loaded_exactly(variant, tmp_path):
    _, theirs = pair(variant)
    theirs.save_pretrained(tmp_path)
    loaded, about = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is StickyMoEForCausalLM
    assert not any(about.values()), about
    assert loaded.dtype == torch.float64
    before, after = theirs.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    tokens = random_tokens(4, 2, 10)
    assert_close(loaded(tokens).logits, theirs(tokens).logits)


def test_the_embedding_that_is_also_the_head_is_saved_once(tmp_path):
    _, theirs = pair("vanilla")
    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == {f"gpt.{name}" for name in theirs.gpt.state_dict()}
    assert sum(VOCAB in value.shape for value in saved.values()) == 1


def test_experts_that_layers_share_are_saved_once_and_loaded(tmp_path):
    _, theirs = pair("vanilla", share_block=2)
    theirs.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.gpt.blocks[1].ffn.experts is loaded.gpt.blocks[0].ffn.experts
    tokens = random_tokens(4, 2, 10)
    assert_close(loaded(tokens).logits, theirs(tokens).logits)


def test_bfloat16_stays_close(tmp_path):
    _, theirs = pair("smooth")
    theirs.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tokens = random_tokens(4, 1, 10)
    logits = loaded(tokens).logits
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()
    assert loaded.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, 13)


def test_the_config_survives_and_has_the_names_that_tools_read(tmp_path):
    variant = {"name": "graded+soft", "lam": 0.3, "layers": [0.0, 1.0]}
    run = config_from({"variant": variant, "model": asdict(SIZES)})
    config = StickyMoEConfig.of_run(run, VOCAB)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is StickyMoEConfig
    assert loaded.run_config().model == SIZES
    assert loaded.run_config().variant == run.variant
    names = {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    assert {name: getattr(loaded, name) for name in names} == names
    assert loaded.max_position_embeddings == SIZES.seq_len
    assert not hasattr(loaded, "top_k")  # a parameter of generate


def test_no_code_of_a_folder_is_run(tmp_path):
    _, theirs = pair("vanilla")
    theirs.save_pretrained(tmp_path)
    names = {"AutoConfig": "evil.StickyMoEConfig", "AutoModelForCausalLM": "evil.StickyMoEForCausalLM"}
    settings = json.loads((tmp_path / "config.json").read_text()) | {"auto_map": names}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was_here')!r}, 'w').close()\n")
    assert type(AutoConfig.from_pretrained(tmp_path)) is StickyMoEConfig
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is StickyMoEForCausalLM
    assert not (tmp_path / "was_here").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 0}, r"^vocab_size: got 0, expected a whole number ≥ 1\.$"),
        ({"model": {"width": 3}}, r"^model\.width: got 3, expected one of d_model, "),
        ({"model": {"top_k": 9}}, r"^model\.top_k: got 9, expected at most n_experts=4\.$"),
        ({"variant": {"lam": 0.1}}, r"^variant\.name: got None, expected the name of a variant\.$"),
        ({"variant": {"name": "sfot"}}, r"^Unknown variant 'sfot'. Did you mean 'soft'\?$"),
        ({"variant": {"name": "soft", "lam": -1.0}}, r"^variant\.lam: got -1\.0, expected a finite number ≥ 0\.$"),
        (
            {"variant": {"name": "trajectory", "sentence": True}},
            r"^variant\.sentence: got True, expected False: transformers does not mark sentences\.$",
        ),
    ],
)
def test_a_config_that_fits_no_model_is_refused(settings, message, tmp_path):
    with pytest.raises(StickyError, match=message):
        StickyMoEConfig(**settings)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "stickymoe", **settings}))
    with pytest.raises(StickyError, match=message):
        AutoConfig.from_pretrained(tmp_path)


# Generation


@every_variant
def test_cached_steps_equal_the_full_pass(variant):
    ours, theirs = pair(variant)
    tokens = random_tokens(5, 2, SIZES.seq_len)
    expected = ours(tokens).logits
    out = theirs(tokens[:, :4], use_cache=True)
    steps = [out.logits]
    for t in range(4, SIZES.seq_len):
        out = theirs(tokens[:, t : t + 1], past_key_values=out.past_key_values)
        steps.append(out.logits)
    assert_close(torch.cat(steps, dim=1), expected)


@every_variant
def test_greedy_text_is_the_argmax_of_the_full_pass(variant):
    ours, theirs = pair(variant)
    tokens = expected = random_tokens(6, 3, 5)
    for _ in range(12):
        expected = torch.cat([expected, ours(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(theirs.generate(tokens, max_new_tokens=12, do_sample=False), expected)


def beams(model: StickyMoEForCausalLM, *, use_cache: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out = model.generate(
        random_tokens(7, 2, 5),
        max_new_tokens=12,
        num_beams=4,
        num_return_sequences=4,
        do_sample=False,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return out.sequences, out.sequences_scores


@every_variant
def test_beams_with_a_cache_equal_beams_without(variant):
    _, theirs = pair(variant)
    (cached, cached_scores), (full, full_scores) = beams(theirs, use_cache=True), beams(theirs, use_cache=False)
    assert torch.equal(cached, full)
    torch.testing.assert_close(cached_scores, full_scores, rtol=0, atol=1e-5)


def test_beams_need_their_cache_in_order(monkeypatch):
    """The test above would notice."""
    _, theirs = pair("smooth")
    full, _ = beams(theirs, use_cache=False)
    monkeypatch.setattr(GenerationCache, "reorder_cache", lambda cache, rows: None)
    assert not torch.equal(beams(theirs, use_cache=True)[0], full)


def test_sampled_text_depends_on_the_seed_alone():
    _, theirs = pair("hysteresis")

    def sample(seed: int, *, use_cache: bool) -> torch.Tensor:
        torch.manual_seed(seed)
        tokens = random_tokens(8, 2, 5)
        return theirs.generate(tokens, max_new_tokens=10, do_sample=True, num_return_sequences=3, use_cache=use_cache)

    assert sample(0, use_cache=True).shape == (6, 15)
    assert torch.equal(sample(0, use_cache=True), sample(0, use_cache=False))
    assert not torch.equal(sample(0, use_cache=True), sample(1, use_cache=True))


def test_a_row_that_ended_does_not_change_the_others():
    _, theirs = pair("residency")
    tokens = random_tokens(9, 3, 5)
    free = theirs.generate(tokens, max_new_tokens=10, do_sample=False)
    end = int(free[0, 8])
    options = {"attention_mask": torch.ones_like(tokens), "eos_token_id": end, "pad_token_id": 0}
    ended = theirs.generate(tokens, max_new_tokens=10, do_sample=False, **options)
    assert (ended[0] == end).any()
    for row, whole in zip(ended, free, strict=True):
        n = [*whole[5:].tolist(), end].index(end) + 6
        assert torch.equal(row[:n], whole[:n])
        assert (row[n:] == 0).all()


def test_generation_continues_from_a_returned_cache():
    _, theirs = pair("siblings")
    tokens = random_tokens(10, 2, 5)
    first = theirs.generate(tokens, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    further = theirs.generate(first.sequences, max_new_tokens=6, do_sample=False, past_key_values=first.past_key_values)
    assert torch.equal(further, theirs.generate(tokens, max_new_tokens=12, do_sample=False))


# What is refused


def padded(*, left: bool) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    return {"input_ids": random_tokens(11, 2, 6), "attention_mask": mask if left else mask.flip(1)}


def test_padding_on_the_left_is_refused():
    _, theirs = pair("vanilla")
    with pytest.raises(ConfigError) as e:
        theirs(**padded(left=True))
    assert str(e.value) == (
        "attention_mask: got padding on the left, expected it on the right; set tokenizer.padding_side='right'."
    )


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}], ids=str)
def test_padded_prompts_are_refused(left, options):
    """With padding on either side a prompt would not be continued from its last token."""
    _, theirs = pair("vanilla")
    with pytest.raises(ConfigError, match=r"^generate: got prompts padded to one length, expected prompts of equal"):
        theirs.generate(**padded(left=left), max_new_tokens=2, **options)


def test_padding_beside_a_cache_is_refused():
    _, theirs = pair("vanilla")
    with pytest.raises(ConfigError, match=r"^attention_mask: got padding with a cache, expected rows of equal length"):
        theirs(**padded(left=False), use_cache=True)


def test_a_mask_of_another_shape_is_refused():
    _, theirs = pair("vanilla")
    mask = torch.ones(1, 1, 6, 6, dtype=torch.long).tril()
    with pytest.raises(ConfigError, match=r"got the shape \[1, 1, 6, 6\], expected that of input_ids, \[2, 6\]\.$"):
        theirs(random_tokens(11, 2, 6), attention_mask=mask)


def test_a_cache_of_transformers_is_refused():
    _, theirs = pair("vanilla")
    with pytest.raises(ConfigError, match=r"^past_key_values: got DynamicCache, expected the cache of an earlier call"):
        theirs(random_tokens(11, 2, 6), past_key_values=DynamicCache())


def test_a_text_that_is_too_long_is_refused_before_it_is_generated():
    _, theirs = pair("vanilla")
    tokens = random_tokens(12, 1, 5)
    assert theirs.generate(tokens, max_new_tokens=19, do_sample=False).shape == (1, SIZES.seq_len)
    with pytest.raises(ConfigError) as e:
        theirs.generate(tokens, max_new_tokens=20, do_sample=False)
    assert str(e.value) == (
        "generate: got 5 tokens and 20 to generate, expected at most seq_len=24 together; set max_new_tokens."
    )


def test_assisted_generation_is_refused():
    _, theirs = pair("vanilla")
    with pytest.raises(ValueError, match="not supported with stateful models"):
        theirs.generate(random_tokens(12, 1, 5), max_new_tokens=3, assistant_model=pair("vanilla")[1])


def test_unknown_arguments_are_not_ignored():
    _, theirs = pair("vanilla")
    with pytest.raises(TypeError, match="position_ids"):
        theirs(random_tokens(12, 1, 5), position_ids=torch.arange(5)[None])
