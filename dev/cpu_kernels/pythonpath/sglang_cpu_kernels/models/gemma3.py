"""SGLang's own Gemma 3, likewise."""

from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM

EntryClass = [Gemma3ForCausalLM]
