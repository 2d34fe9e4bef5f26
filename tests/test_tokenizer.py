"""Token ids: OpenAI's vocabulary as open_clip reads it, learned BPE, characters."""

import random
from pathlib import Path

import pytest

from m1clip.model import tokenizer
from m1clip.model.tokenizer import Tokenizer, clean, make_tokenizer


@pytest.fixture(scope="module")
def vocabulary() -> Path:
    import open_clip

    return Path(open_clip.__file__).parent / "bpe_simple_vocab_16e6.txt.gz"


def web_strings() -> list[str]:
    """Strings as the web has them: emoji, entities, broken encodings, control characters."""
    fixed = [
        "a photo of a cat",
        "A PHOTO of a CaT!!!",
        "  spaces\tand\nlines \u00a0 and\u2003more ",
        "emoji 😀🎉👩‍👩‍👧 flags 🇩🇪",
        "&lt;b&gt;bold&lt;/b&gt; &amp;amp; &quot;quoted&quot; &#39;s",
        "naïve café Ångström ﬁne ＦＵＬＬ",
        "schÃ¶n â€œmojibakeâ€\u009d",
        "it's they're I'll we've I'd 'tis don't",
        "'SSSH, it'S",
        "1234567890 3.14 -1e5 ½ ² Ⅷ",
        "日本語の字幕 한국어 العربية עברית हिन्दी ไทย",
        "http://example.org/?q=a&b=c#x user@example.org #tag @name",
        "snake_case-kebab--dash...!?;:(){}[]<>|\\/~`^*+=%$",
        "word " * 200,
        "x" * 500,
        "\u200bzero\u200dwidth\ufeff",
        "control \x07 bell \x1b[31mred\x1b[0m",
        "İstanbul DŽ ß ẞ ſ ﬀ",
        "ΛΟΓΟΣ ΟΔΥΣΣΕΥΣ",
        "e\u0301 combining e\u0301",
        "“curly” ‘quotes’ – dash — long …",
    ]
    rng = random.Random(0)
    alphabet = "abcXYZ 019'.,!&;<>#é ßñ😀🐕漢字\u00a0-_/()\"“”|…½"
    return fixed + ["".join(rng.choices(alphabet, k=rng.randint(1, 90))) for _ in range(400)]


def test_the_clip_vocabulary_gives_the_ids_of_open_clip(vocabulary):
    import open_clip

    ours, theirs = Tokenizer.from_clip_vocabulary(vocabulary), open_clip.SimpleTokenizer()
    assert (len(ours), ours.start_id, ours.end_id) == (49408, 49406, 49407)
    texts = [text for text in web_strings() if clean(text)]
    assert len(texts) > 380
    for text in texts:
        ids = ours([text], 77)[0].tolist()
        expected = theirs([text], 77)[0].tolist()
        assert ids == expected[: len(ids)], text
        assert not any(expected[len(ids) :]), text


def test_the_character_tokenizer_has_33_tokens():
    tokenizer = Tokenizer.characters()
    assert len(tokenizer) == 33
    assert tokenizer(["Ab c."], 77).tolist() == [[1, 4, 5, 30, 6, 31, 2, 0]]
    assert tokenizer(["é9"], 77)[0, 1:3].tolist() == [8, 3]  # the accent is removed, the digit is unknown


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_saved_and_loaded_gives_the_same_ids(kind, tmp_path):
    tokenizer = make_tokenizer(kind, ["two red cats in the snow", "one blue dog"], 400)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    texts = ["two blue cats", "zebra 😀"]
    assert loaded(texts, 32).tolist() == tokenizer(texts, 32).tolist()


def test_learned_bpe_has_one_token_for_a_frequent_word_and_encodes_every_byte():
    tokenizer = Tokenizer.train_bpe(["two red cats in the snow"] * 3, 400)
    assert tokenizer(["two red cats in the snow"], 32)[0].tolist()[7:] == [2]
    assert tokenizer(["漢字 😀"], 32)[0].max() < len(tokenizer)


def test_a_long_text_is_truncated_and_keeps_its_end():
    ids = Tokenizer.characters()(["a" * 500], 77)
    assert ids.shape == (1, 77)
    assert ids[0, -1] == 2


def test_a_batch_is_padded_to_the_smallest_bucket_that_holds_it():
    tokenizer = Tokenizer.characters()
    assert tokenizer(["abc"], 77).shape[1] == 8
    assert tokenizer(["abc", "a" * 15], 77).shape[1] == 24
    assert tokenizer(["a" * 70], 77).shape[1] == 77
    assert tokenizer(["a" * 10], 14).shape[1] == 14  # never beyond the context length


@pytest.mark.parametrize("empty", ["", "   ", "\n\t"])
def test_an_empty_caption_is_an_error_that_names_its_index(empty):
    with pytest.raises(ValueError, match="text 1 is empty"):
        Tokenizer.characters()(["fine", empty], 77)


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_caption_cannot_spell_the_end_token(kind):
    tokenizer = make_tokenizer(kind, ["a cat"], 400)
    ids = tokenizer(["cat <|endoftext|> dog"], 77)[0].tolist()
    assert ids.count(tokenizer.end_id) == 1


def test_a_wrong_vocabulary_file_is_refused(tmp_path):
    (tmp_path / "v.txt").write_text("version\nonly-one-symbol\n")
    with pytest.raises(ValueError, match="not a CLIP vocabulary"):
        make_tokenizer(str(tmp_path / "v.txt"), [], 100)
    (tmp_path / "v.gz").write_bytes(b"not gzip")
    with pytest.raises(ValueError, match="cannot read"):
        make_tokenizer(str(tmp_path / "v.gz"), [], 100)
    with pytest.raises(ValueError, match="there is no file"):
        make_tokenizer("bep", [], 100)


def test_clean_fixes_entities_encodings_and_white_space():
    assert clean("tom &amp;amp; jerry") == "tom & jerry"
    assert clean("schÃ¶n\n  gut") == "schön gut"
    assert clean("plain ascii") == "plain ascii"


def test_bpe_is_learned_from_words_and_captions_of_bounded_length(monkeypatch):
    texts = list(tokenizer.training_texts(["a " + "x" * 5000 + " b", "CAT"]))
    assert texts == ["a " + "x" * 256 + " b", "cat"]
    monkeypatch.setattr(tokenizer, "BPE_BYTES", 10)
    assert list(tokenizer.training_texts(["four", "eight", "twelve"])) == ["four", "eight"]
