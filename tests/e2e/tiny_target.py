"""A tiny language model that answers, trained on the spot: what end-to-end tests prune, distil and serve."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ("red", "blue", "green", "gold", "black", "white")
ANIMALS = ("cat", "dog", "fox", "owl", "bee", "cow", "hen", "ant")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def counting(rng: random.Random) -> tuple[str, str]:
    start, count = rng.randint(1, 60), rng.randint(8, 16)
    return f"count {count} numbers from {start}", " ".join(str(start + i) for i in range(count))


def naming(rng: random.Random) -> tuple[str, str]:
    word, animal, count = rng.choice(WORDS), rng.choice(ANIMALS), rng.randint(4, 8)
    return f"say {count} times the {word} {animal}", " and ".join([f"the {word} {animal}"] * count)


DOMAINS = {"counting": counting, "naming": naming}


def prompts(domain: str, count: int) -> list[str]:
    """Different prompts of a domain."""
    rng, found = random.Random(domain), {}
    while len(found) < count:
        found[DOMAINS[domain](rng)[0]] = None
    return list(found)


def text(count: int) -> list[str]:
    """Lines of plain text in the model's words."""
    rng = random.Random("text")
    return [" ".join(DOMAINS[rng.choice(list(DOMAINS))](rng)) for _ in range(count)]


def make(folder: Path, *, steps: int = 250) -> Path:
    """Train the model and save it as a Hugging Face folder. Takes about half a minute on one core."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=512, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=3, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(0)
    for _ in range(steps):
        batch = tokenizer([_conversation(rng) for _ in range(16)], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**{key: batch[key] for key in ("input_ids", "attention_mask")}, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone, and pods have another user
    return folder


def _conversation(rng: random.Random) -> str:
    prompt, answer = rng.choice(list(DOMAINS.values()))(rng)
    return f"<|user|>{prompt}</s><|assistant|>{answer}</s>"


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(text(2000), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    return fast
