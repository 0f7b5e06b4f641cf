"""Texts, chats and tables become rows of tokens."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from torch.nn import functional

from offload import testing
from offload.errors import ConfigError
from offload.finetune.corpus.documents import Chat, Completion, Record, Text, find_data, read_records
from offload.finetune.corpus.packing import Document, Rows, encode, notices, pack
from offload.finetune.corpus.token_stream import read_bytes
from offload.finetune.model import APART, make_ready, without_cache
from tests.support import rounding_bounds
from tests.support.model_folders import MARKING_TEMPLATE, PLAIN_TEMPLATE, llama_config, tokenizer, write_lines
from tests.support.models import DECODER, gpt2

SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"}]


def words(document: Document, by: Any) -> tuple[str, str]:
    """All of a document, and what is learned of it."""
    return by.decode(document.ids), by.decode(document.ids[document.learned])


def one(record: Record, by: Any) -> tuple[str, str]:
    (document,) = encode([record], by)
    assert document.divisible == isinstance(record, Text)
    return words(document, by)


# -- tokens -------------------------------------------------------------------------------------------


def test_text_is_learned_to_its_end() -> None:
    assert one(Text("", "one é"), tokenizer()) == ("one é</s>", "one é</s>")
    (empty,) = encode([Text("", "")], tokenizer())
    assert len(empty.ids) == 0


def test_only_assistant_tokens_of_a_chat_are_learned() -> None:
    marking = tokenizer(MARKING_TEMPLATE)
    assert one(Chat("", SAID), marking) == ("<|user|>hi<|assistant|>yes</s><|user|>so", "yes</s>")
    whole = "<|user|>hi</s><|assistant|>yes</s><|user|>so</s>"
    assert one(Chat("", SAID), tokenizer(PLAIN_TEMPLATE)) == (whole, "<|assistant|>yes</s>")
    (document,) = encode([Chat("", SAID)], tokenizer(PLAIN_TEMPLATE), whole=True)
    assert words(document, tokenizer()) == (whole, whole)


def test_of_a_completion_the_completion() -> None:
    assert one(Completion("", "2 + 2 =", " 4"), tokenizer()) == ("2 + 2 = 4</s>", " 4</s>")


def test_a_tokenizer_that_begins_and_ends_all_it_is_given() -> None:
    both = tokenizer()
    both.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert one(Completion("", "p", "c"), both) == ("<s>pc</s>", "c</s>")
    assert one(Text("", "t"), both) == ("<s>t</s>", "<s>t</s>")
    assert one(Completion("", "p</s>", "c"), both) == ("<s>p</s>c</s>", "c</s>")


def test_without_a_tokenizer_tokens_are_bytes() -> None:
    text, completion = encode([Text("", "é"), Completion("", "a", "b")], None)
    assert bytes(text.ids.astype(np.uint8)) == "é\n".encode()
    assert completion.ids.tolist() == [97, 98, 10] and completion.learned.tolist() == [False, True, True]
    with pytest.raises(ConfigError, match=r"chats:3 is a chat.*no chat template"):
        encode([Chat("chats:3", SAID)], None)


def test_what_a_template_refuses_is_named() -> None:
    picky = tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match=r"chats:3: .*template refuses this chat: roles must alternate"):
        encode([Chat("chats:3", SAID)], picky)


# -- rows ---------------------------------------------------------------------------------------------


def documents(*lengths: int, divisible: bool = False) -> list[Document]:
    """Documents whose tokens are all different."""
    starts = np.cumsum([1, *lengths])
    return [
        Document(np.arange(start, start + length, dtype=np.int32), np.ones(length, bool), divisible)
        for start, length in zip(starts, lengths, strict=False)
    ]


SIZES = st.just(0) | st.integers(3, 40)


@given(st.lists(SIZES, max_size=30), st.lists(st.integers(3, 40), min_size=1, max_size=30), st.integers(3, 16))
def test_each_token_lies_in_one_row(texts: list[int], whole: list[int], length: int) -> None:
    made = documents(*texts, divisible=True) + documents(*whole)
    for document in made[len(texts) :]:
        document.ids[:] += 100_000
    packed = pack(made, length)
    counts = Counter(packed.ids.ravel().tolist())
    for document in made[len(texts) :]:
        assert all(counts[token] == 1 for token in document.ids[:length].tolist())
        ((row, start),) = np.argwhere(packed.ids == document.ids[0])
        taken = document.ids[:length]
        assert (packed.ids[row, start : start + len(taken)] == taken).all(), "a chat lies in one row"
        assert packed.positions[row, start] == 0 and packed.labels[row, start] == -100
        assert (packed.labels[row, start + 1 : start + len(taken)] == taken[1:]).all()
    rows_of_text = [row for row in packed.ids.tolist() if any(0 < token < 100_000 for token in row)]
    tokens = [token for row in rows_of_text for token in row if 0 < token < 100_000]
    lost = sum(texts) - len(tokens)
    assert tokens == list(range(1, len(tokens) + 1)) and lost in (0, 1), "the last one may be alone in its row"
    assert packed.cut == sum(size > length for size in whole) and packed.dropped == 0


def test_what_cannot_be_learned_is_left_out() -> None:
    long_prompt = Document(np.arange(20, dtype=np.int32), np.arange(20) >= 15, False)
    packed = pack([long_prompt, *documents(4)], 8)
    assert (packed.dropped, packed.cut, len(packed.ids)) == (1, 1, 1)
    with pytest.raises(ConfigError, match=r"the data contain nothing to learn.*--seq-len 8"):
        pack([long_prompt], 8)
    only_the_user = Document(np.arange(6, dtype=np.int32), np.zeros(6, bool), False)
    with pytest.raises(ConfigError, match=r'no message has the role "assistant" and a text.*--train-on all'):
        pack([only_the_user], 8)
    for empty in ([], documents(0)):
        with pytest.raises(ConfigError, match="the data contain nothing to learn: they are empty"):
            pack(empty, 8)


@pytest.mark.parametrize("make", [gpt2, lambda: transformers.LlamaForCausalLM(llama_config())])
@pytest.mark.numeric
def test_a_row_is_learned_as_its_documents_are_alone(make: Any) -> None:
    """The oracle: each document in a forward of its own."""
    torch.manual_seed(0)
    model = make().eval()
    make_ready(model, False)
    records = [Completion("", "one", " and two"), Completion("", "three", " four"), Completion("", "5", "6")]
    made = encode(records, None)
    rows = Rows(pack(made, 40), 1, 1, seed=0)
    assert rows.row_count == 1
    inputs = {k: v % 128 if k == "input_ids" else v for k, v in rows.inputs(1, 0).items()}
    together = model(**inputs, **without_cache(model)).loss
    sums, count = torch.tensor(0.0), 0
    for document in made:
        ids = torch.from_numpy(document.ids.astype(np.int64))[None] % 128
        learned = torch.from_numpy(document.learned)[1:]
        loss = functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
        sums, count = sums + loss[learned].sum(), count + int(learned.sum())
    rounding_bounds.same_tensor(together, sums / count, rounding_bounds.sum_error(rounding_bounds.roundings(model)))


SMALL = {**DECODER, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64, "eos_token_id": 2}
ITS_OWN: dict[str, dict[str, Any]] = {
    "gpt2": OLD,
    "gptj": {**OLD, "rotary_dim": 8},
    "gpt_neox": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "mixtral": {**SMALL, "num_local_experts": 4},
    "qwen3_moe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


WITH_EXPERTS = ("mixtral", "qwen3_moe")


@pytest.mark.sample(8)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(APART))
@pytest.mark.numeric
def test_documents_of_a_row_do_not_see_each_other(family: str) -> None:
    config = transformers.AutoConfig.for_model(family, **ITS_OWN.get(family, SMALL))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert model.config.model_type == family and without_cache(model) == {"use_cache": False}
    left, right, second = (torch.randint(3, 128, (1, 10), generator=torch.Generator().manual_seed(n)) for n in range(3))
    places = torch.arange(10).repeat(2)[None]
    with torch.no_grad():
        outputs = [
            model(torch.cat([first, second], 1), position_ids=places, use_cache=False).logits[:, 10:]
            for first in (left, right)
        ]
        alone = model(second, use_cache=False).logits
    if family in WITH_EXPERTS:  # other documents share an expert's product, whose order of additions its size decides
        rounding_bounds.same_tensor(*outputs, rounding_bounds.sum_error(rounding_bounds.roundings(model)))
    else:
        assert torch.equal(*outputs)
    rounding_bounds.same_tensor(outputs[0], alone, rounding_bounds.sum_error(rounding_bounds.roundings(model)))


def test_where_they_would_each_has_a_row_of_its_own() -> None:
    packed = pack(documents(3, 2, 4), 8, together=False)
    assert packed.alone and len(packed.ids) == 3
    records = [Completion("", "one", " and two"), Completion("", "three", " four")]
    packed = pack(encode(records, None), 40, together=False)
    assert "each of these has a row of its own" in " ".join(
        notices(packed, Rows(packed, 1, 1, 0), Counter(map(type, records)), None)
    )


def test_a_long_text_is_encoded_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    by, text = tokenizer(), "one two\n" * 20
    (whole,) = encode([Text("", text)], by)
    testing.replace(monkeypatch, "size.text_piece", 10)
    (pieces,) = encode([Text("", text)], by)
    assert by.decode(pieces.ids) == by.decode(whole.ids) and pieces.learned.all()


# -- batches ------------------------------------------------------------------------------------------


def rows_of(sizes: Sequence[int] = (8,) * 10, size: int = 2, **options: Any) -> Rows:
    return Rows(pack(documents(*sizes), 8), size, **({"accumulation": 2, "seed": 3} | options))


def first_tokens(rows: Rows, step: int, micro: int) -> list[int]:
    tokens: list[int] = rows.inputs(step, micro)["input_ids"][:, 0].tolist()
    return tokens


def test_a_batch_depends_on_nothing_else() -> None:
    ahead, rows = rows_of(), rows_of()
    ahead.inputs(9, 0)  # an earlier one leaves no trace
    for step in (4, 1):
        for name, value in ahead.inputs(step, 1).items():
            assert torch.equal(value, rows.inputs(step, 1)[name]) and value.dtype == torch.int64
    assert first_tokens(rows_of(seed=4), 1, 0) != first_tokens(rows, 1, 0)


def test_ranks_have_their_rows_of_the_same_batch() -> None:
    whole = rows_of(size=4)
    for step, micro in ((1, 0), (2, 1)):
        parts = [first_tokens(rows_of(rank=rank, world_size=2), step, micro) for rank in (0, 1)]
        assert parts[0] + parts[1] == first_tokens(whole, step, micro)


def test_the_learned_tokens_are_reported() -> None:
    records: list[Record] = [Chat("", SAID), Completion("", "p" * 9, "c"), Completion("", "p", "c" * 99)]
    for template, whole, chats, pairs in (
        (
            MARKING_TEMPLATE,
            False,
            "only the assistant's words are learned, as the chat template marks them",
            "the completions",
        ),
        (PLAIN_TEMPLATE, False, "only the assistant's words are learned, found as what", "the completions"),
        (PLAIN_TEMPLATE, True, "the words of all roles are learned", "both"),
    ):
        by = tokenizer(template)
        packed = pack(encode(records, by), 8)
        output = "\n".join(notices(packed, Rows(packed, 1, 1, 0), Counter(map(type, records)), by, whole))
        assert f"chats: {chats}" in output and f"completions: {pairs} are learned" in output
        assert "3 documents in 2 rows of 8 tokens" in output
        assert "3 documents are longer than a row, and cut" in output and "1 document is left out" in output


CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": 7}'


def test_every_kind_of_line(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"text": "one\\ntwo"}}\n\n{CHAT}\r\n{{"prompt": "p", "completion": ""}}')
    text, chat, completion = [*read_records([file])]
    assert text == Text(f"{file}:1", "one\ntwo")
    assert isinstance(chat, Chat) and chat.place == f"{file}:3" and chat.messages[1]["content"] == "b"
    assert completion == Completion(f"{file}:4", "p", "")


def test_rows_of_sharegpt_and_alpaca_are_messages(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]
    rows = [
        {"conversations": turns, "system": "s", "id": 7},
        {"instruction": "add", "input": "1, 2", "output": "3"},
        {"conversations": [{"role": "user", "content": "a"}]},
    ]
    lines, whole = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    whole.write_bytes(b"\xef\xbb\xbf" + json.dumps(rows * 20_000, indent=1).encode())  # more than is read at a time
    first, second, third = [*read_records([lines])]
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "a"}
    assert first == Chat(f"{lines}:1", [system, user, {"role": "assistant", "content": "b", "weight": 0}])
    asked = {"role": "user", "content": "add\n\n1, 2"}
    assert second == Chat(f"{lines}:2", [asked, {"role": "assistant", "content": "3"}])
    assert third == Chat(f"{lines}:3", [user])
    records = [*read_records([whole])]
    assert len(records) == 60_000 and records[-1] == third._replace(place=f"{whole}: item 60000")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", "item 1 is not JSON: Expecting value"),
        ('[{"text": "a"} {"text": "b"}]', "item 2 is not JSON: expected ','"),
        ('[[{"text": "a"}]]', "item 1 contains a list"),
        ('[{"text": "a"}, {"te', "item 2 is not JSON"),
    ],
)
def test_a_list_that_is_none_is_named_by_its_item(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(words)):
        [*read_records([tmp_path / "rows.json"])]


def test_a_data_set_of_the_hub_has_rows_as_a_file_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in the place of the hub: `datasets` finds it by the same name."""
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "owner/set/data").mkdir(parents=True)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for split, count in (("train", 3), ("test", 2)):
        rows = [{"messages": turns, "id": number} for number in range(count)]
        write_lines(tmp_path / f"owner/set/data/{split}.jsonl", rows)
    records = [*read_records(find_data([Path("owner/set:test")]))]
    assert records == [Chat(f"owner/set:test: row {number}", turns) for number in (1, 2)]
    with pytest.raises(ConfigError, match=r"no data set of the hub can be loaded by that name .*no_split"):
        find_data([Path("owner/set:no_split")])
    with pytest.raises(ConfigError, match=r"no data at owner/typo\.jsonl$"):
        find_data([Path("owner/typo.jsonl")])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'offload\[datasets\]'"):
        find_data([Path("owner/other")])


def test_a_folder_is_searched_in_an_order_that_stays(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("z.txt", "b/2.jsonl", "b/1.md", "config.json", "weights.bin"):
        (tmp_path / name).write_text("")
    names = [file.relative_to(tmp_path).as_posix() for file in find_data([tmp_path, tmp_path / "config.json"])]
    assert names == ["b/1.md", "b/2.jsonl", "z.txt", "config.json"]


@pytest.mark.parametrize("path", ["missing", "empty"])
def test_no_data_is_an_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"there is no .*{path}"):
        find_data([tmp_path / path])


WRONG = {
    "{": "is not JSON",
    "[1]": "a file that is one list is called",
    '{"conversations": [{"from": "bard", "value": "a"}]}': "message 1 is from 'bard'; expected one of human",
    '{"instruction": "a", "output": "b", "history": [["c", "d"]]}': "contains a history, which is not read",
    '{"messages": [{"role": "user", "content": "a", "weight": 0.5}]}': 'expected 0 or 1 as "weight"',
    '"words"': "contains a string",
    "{}": "contains no key; each line must be one of",
    '{"txt": "a"}': "contains txt; each line must be one of",
    '{"text": "a", "messages": []}': "contains text, messages",
    '{"text": null}': "text must be a string, got null",
    '{"prompt": "a"}': 'contains no "completion"',
    '{"prompt": [], "completion": "a"}': "prompt must be a string, got an empty list",
    '{"messages": []}': "at least one message, got an empty list",
    '{"messages": "a"}': "must be a list of at least one message, got a string",
    '{"messages": ["a"]}': "message 1 must be an object",
    '{"messages": [{"content": "a"}]}': 'message 1 contains no "role"',
    '{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}': 'message 2 contains no "content"',
    '{"messages": [{"role": "user", "content": 3}]}': "content must be a string, got a number",
    '{"messages": [{"role": "user", "content": "a"}], "tools": {"name": "f"}}': "list of JSON schemas, got an object",
    '{"messages": [{"role": "user", "content": "a"}], "tools": ["f"]}': "tools must be a list of JSON schemas",
    '{"messages": [{"role": "user", "content": "a"}], "tools": "{"}': "list of JSON schemas, or its JSON",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"text": "right"}}\n\n{line}\n')
    with pytest.raises(ConfigError) as promoted:
        [*read_records([file])]
    assert str(promoted.value).startswith(f"{file}:3") and WRONG[line] in str(promoted.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "right"}\n{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"data.jsonl:2 is not UTF-8: invalid start byte at byte 10"):
        [*read_records([file])]


def test_a_lone_surrogate_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n{"text": "lone \\ud83d surrogate"}\n')
    with pytest.raises(ConfigError, match=r"data\.jsonl:2 contains half of a surrogate pair, '\\ud83d'"):
        [*read_records([file])]


@pytest.mark.parametrize("name", ["data.jsonl", "data.csv", "data.txt"])
def test_a_file_of_holes_is_not_read(name: str, tmp_path: Path) -> None:
    """Its first line may be as long as it claims to be, which is any number of terabytes."""
    with (tmp_path / name).open("wb") as file:
        file.truncate(512 << 20)
    with pytest.raises(ConfigError, match=rf"cannot read .*{name}: the file has 512.0 MiB, all but .* holes"):
        [*read_records([tmp_path / name])]
    with pytest.raises(ConfigError, match=rf"cannot read .*{name}: the file has 512.0 MiB, all but .* holes"):
        read_bytes([tmp_path / name])


# --------------------------------------------------------------------------------------------------
# CSV and Parquet files give the documents of the same lines of JSON; a wrong row is an error that names it.


CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
TABLE_CHAT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "name": "add"},
]


def contents(file: Path) -> list[tuple[Any, ...]]:
    """The documents of a file, without their places."""
    return [(type(record), *record[1:]) for record in read_records([file])]


def as_json(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def as_csv(file: Path, rows: list[dict[str, Any]]) -> Path:
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return file


def as_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.Table.from_pylist([dict.fromkeys(names) | row for row in rows])
    pyarrow.parquet.write_table(table, file, row_group_size=2)
    return file


def read(file: Path) -> list[Record]:
    return [*read_records([file])]


# -- the same documents -------------------------------------------------------------------------------


def test_a_chat_has_its_tools_as_a_list_or_as_its_json(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows: list[dict[str, Any]] = [
        {"messages": TABLE_CHAT, "tools": tools},
        {"messages": TABLE_CHAT, "tools": None},
        {"messages": TABLE_CHAT[:1], "tools": tools},
    ]
    expected = contents(as_json(tmp_path / "a.jsonl", rows))
    assert [content[2] for content in expected] == [tools, None, tools]
    assert contents(as_parquet(tmp_path / "a.parquet", rows)) == expected
    for row in rows:
        row["tools"] = row["tools"] and json.dumps(row["tools"])
    assert contents(as_parquet(tmp_path / "b.parquet", rows)) == expected
    assert contents(as_json(tmp_path / "b.jsonl", rows)) == expected


def test_every_kind_in_one_parquet_file_without_the_nulls_between_them(tmp_path: Path) -> None:
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": TABLE_CHAT}, {"text": "t"}, {"messages": plain}, {"prompt": "p", "completion": ""}]
    assert contents(as_parquet(tmp_path / "a.parquet", rows)) == contents(as_json(tmp_path / "a.jsonl", rows))


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")), min_size=1))
def test_any_text_survives_csv_and_parquet(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"prompt": text, "completion": text[::-1]} for text in texts]
    expected = contents(as_json(folder / "a.jsonl", rows))
    assert contents(as_csv(folder / "a.csv", rows)) == expected
    assert contents(as_parquet(folder / "a.parquet", rows)) == expected


# -- places, order, and how much is read --------------------------------------------------------------


def test_records_name_their_line_or_row(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('\ufefftext,n\n"one\ntwo",1\n\nthree,2\n')
    assert [record.place for record in read(file)] == [f"{file}:2", f"{file}:5"]
    rows = as_parquet(tmp_path / "a.parquet", [{"text": str(number)} for number in range(5)])
    assert [record.place for record in read(rows)] == [f"{rows}: row {number}" for number in range(1, 6)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_what_comes_later_is_read_later(tmp_path: Path, name: str) -> None:
    first = "text\nright\n" if name == "a.csv" else '{"text": "right"}\n'
    (tmp_path / name).write_bytes(first.encode() + b"\xff\n")
    records = read_records([tmp_path / name, tmp_path / "missing.jsonl"])
    assert next(records)[1] == "right"
    with pytest.raises(ConfigError, match=r"is not UTF-8"):
        next(records)


# -- what is none -------------------------------------------------------------------------------------

WRONG_CSV = {
    "id,body\n1,a\n": r":1 contains the columns id, body; rename one to text",
    "": r" contains the columns \(none\)",
    "text\na\nb,c\n": r":3 contains 2 fields, and the first line names 1 column",
    'text\na\n"b\nc\n': r":3 is not CSV: unexpected end of data",
    'text\n"a"b\n': r":2 is not CSV: ',' expected after '\"'",
    "text,prompt\na,b\n": r":2 contains text, prompt; each line must be one of",
    "prompt\na\n": r':2 contains no "completion"',
    "messages\n[]\n": r":2: messages must be a list of at least one message, got a string",
}


@pytest.mark.parametrize("content", WRONG_CSV)
def test_a_wrong_csv_file_is_an_error_with_its_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ConfigError, match=rf"a\.csv{WRONG_CSV[content]}"):
        read(tmp_path / "a.csv")


WRONG_ROWS: dict[str, list[dict[str, Any]]] = {
    r" contains the columns id, body; rename one to text": [{"id": 1, "body": "a"}],
    r": row 2 contains no key; each line must be one of": [{"text": "a"}, {"text": None}],
    r": row 1: text must be a string, got a number": [{"text": 3}],
    r": row 1: text must be a string, got a value of type bytes": [{"text": b"a"}],
    r': row 1: message 2 contains no "content"': [{"messages": [{"role": "a", "content": "b"}, {"role": "a"}]}],
}


@pytest.mark.parametrize("message", WRONG_ROWS)
def test_a_wrong_row_of_parquet(tmp_path: Path, message: str) -> None:
    file = as_parquet(tmp_path / "a.parquet", WRONG_ROWS[message])
    with pytest.raises(ConfigError, match=rf"a\.parquet{message}"):
        read(file)


def test_no_parquet_at_all_or_a_torn_one(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    file.write_text('{"text": "right"}\n')
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read as Parquet after row 0"):
        read(file)
    as_parquet(file, [{"text": f"{n}" * 500} for n in range(100)])
    content = bytearray(file.read_bytes())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read .*a\.parquet: |a\.parquet cannot be read as Parquet"):
        read(file)


def test_without_pyarrow_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_parquet(tmp_path / "a.parquet", [{"text": "a"}])
    as_csv(tmp_path / "b.csv", [{"text": "a"}])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert find_data([tmp_path / "b.csv"]) and len(read(tmp_path / "b.csv")) == 1
    with pytest.raises(ConfigError, match=r"pip install 'offload\[data\]'"):
        find_data([tmp_path])
