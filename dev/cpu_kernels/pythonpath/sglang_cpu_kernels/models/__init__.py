"""The few models that are served on a CPU, for ``SGLANG_EXTERNAL_MODEL_PACKAGE``."""
