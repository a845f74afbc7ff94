"""SGLang's own Llama, found without importing all its other models."""

from sglang.srt.models.llama import LlamaForCausalLM

EntryClass = [LlamaForCausalLM]
