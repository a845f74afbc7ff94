"""The stages that are clients of an SGLang server."""
