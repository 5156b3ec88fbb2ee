"""Hugging Face: our models in transformers. Importing this package registers them with the Auto classes."""

from transformers import AutoConfig, AutoModelForCausalLM

from stickymoe.huggingface.model import StickyMoEConfig, StickyMoEForCausalLM

AutoConfig.register(StickyMoEConfig.model_type, StickyMoEConfig)
AutoModelForCausalLM.register(StickyMoEConfig, StickyMoEForCausalLM)
