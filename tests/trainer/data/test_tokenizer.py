"""The tokenizer as the training stages use it."""

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from osprey_trainer.data.tokenizer import DocumentTokenizer


def test_every_id_is_below_the_size_also_where_ids_have_holes(tmp_path):
    words = Tokenizer(models.WordLevel({"owl": 0, "<end>": 1, "flies": 70_000}, unk_token="owl"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path)
    tokenizer = DocumentTokenizer.load(tmp_path)
    assert tokenizer.encode(["flies"]) == [[70_000]]
    assert (tokenizer.size, tokenizer.end_id) == (70_001, 1)
