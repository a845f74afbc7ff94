"""Attention of the unroll over packed dialogues, without a mask."""
