"""Everything about the SGLang server: its plugin, its files, and the stages that are its clients."""
