"""Of a chat the assistant's tokens are learned, whatever the template: those that {% generation %} would mark."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import AddedToken

from offload.errors import ConfigError
from offload.finetune.corpus.chats import Example, encode_chat, learned_words, visible_text
from offload.finetune.corpus.documents import Chat
from tests.support.model_folders import MARKING_TEMPLATE, PLAIN_TEMPLATE, tokenizer

CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


TURNS = [user("two and two?"), assistant("four 🎉"), user(" and \n more"), assistant("")]
CHATS = {
    "one turn": TURNS[:2],
    "several turns, the last one empty": TURNS,
    "a system message": [{"role": "system", "content": "be brief"}, *TURNS],
    "the user last": TURNS[:3],
    "a call": [user("q"), assistant("so", tool_calls=CALLS), {"role": "tool", "content": "4"}, assistant("four")],
    "no answer": TURNS[:1],
}
# Templates of our own in the shapes of families; B and E are replaced by the marks, or by nothing.
SHAPES = {
    "headers around each message": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\nB{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\nE{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "a begin, trimmed messages and declared tools": (
        "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|h|>{{ m.role }}<|/h|>"
        "{{ '\n\n' }}B{{ m.content | trim }}<|eot|>E{% endfor %}"
        "{% if add_generation_prompt %}<|h|>assistant<|/h|>{{ '\n\n' }}{% endif %}"
    ),
    "an end of the text behind the last message": (
        "{% for m in messages %}<|{{ m.role }}|>\nB{{ m.content }}<|end|>\nE{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% elif messages[-1].role == 'assistant' %}B{{ eos_token }}E"
        "{% else %}{{ eos_token }}{% endif %}"
    ),
    "no header of the assistant": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}B {{ m.content }}{{ eos_token }}E"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    ),
    "a prompt that opens the reasoning": (
        "{% for m in messages %}<|{{ m.role }}|>\nB{{ m.content }}<|end|>E{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}"
    ),
}


def marked(template: str) -> str:
    """Marks what is between B and E of messages whose role is the assistant's."""
    pieces = template.split("B")
    return pieces[0] + "".join(
        f"{{% if (m or messages[-1]).role == 'assistant' %}}{{% generation %}}{inside}{{% endgeneration %}}{{% else %}}"
        f"{inside}{{% endif %}}{rest}"
        for inside, _, rest in (piece.partition("E") for piece in pieces[1:])
    )


def coder(template: str | None, merged: bool) -> Any:
    """A tokenizer of bytes; if `merged`, with tokens across words, and marks of turns that take what is around them."""
    made = tokenizer(template)
    if merged:
        words = ("<|im_start|>", "<|im_end|>", "<|eot|>", "<|end|>", "<think>", "\n\n", "four", "assistant\n")
        made.add_tokens([AddedToken(word, normalized=False) for word in words])
    return made


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_mask_is_that_of_the_same_template_with_marks(shape: str, merged: bool) -> None:
    template = SHAPES[shape]
    bare, marking = template.replace("B", "").replace("E", ""), marked(template)
    for name, messages in CHATS.items():
        chat = Chat(name, messages, TOOLS if name == "a call" else None)
        expected = coder(marking, merged).apply_chat_template(
            messages, tools=chat.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learned = encode_chat(chat, coder(bare, merged))
        assert ids == expected["input_ids"], name
        assert [int(each) for each in learned] == expected["assistant_masks"], (name, Example.of(ids, learned, None))
        assert any(learned) == any(each["role"] == "assistant" for each in messages)
        assert encode_chat(chat, coder(bare, merged), whole=True) == (ids, [True] * len(ids))


def text_of(messages: list[dict[str, Any]], template: str) -> str:
    """What is shown of a chat: learned tokens between [[ and ]]."""
    by = coder(template, False)
    return str(Example.of(*encode_chat(Chat("", messages), by), by))


@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}])
def test_a_message_may_be_left_out_of_what_is_learned(key: dict[str, Any]) -> None:
    messages: list[dict[str, Any]] = [
        *({"role": "user", "content": "1"}, {"role": "assistant", "content": "one"} | key),
        *({"role": "user", "content": "2"}, {"role": "assistant", "content": "two"}),
    ]
    bare, marks = PLAIN_TEMPLATE, MARKING_TEMPLATE
    for template in (bare + "{% if add_generation_prompt %}<|assistant|>{% endif %}", marks):
        shown = text_of(messages, template)
        assert "[[two" in shown and "one" in shown and "[[one" not in shown


def test_a_template_that_shows_a_turn_in_another_way_later_is_an_error() -> None:
    drops = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else m.content.split('</think>')[-1] }}</s>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    thinking = [user("q"), assistant("<think>so</think>a"), user("q"), assistant("<think>ah</think>b")]
    with pytest.raises(ConfigError, match=r"chats:7: message 2 is learned as the assistant's.*--train-on all"):
        encode_chat(Chat("chats:7", thinking), coder(drops, False))
    assert text_of(thinking[:2], drops) == "<|user|>q</s><|assistant|>[[<think>so</think>a</s>]]"


# -- known families ------------------------------------------------------------------------------------

QWEN_2_5 = """{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name }}{%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}"""
QWEN_3 = """{%- set ns = namespace(last_query_index=messages|length - 2) %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = message.reasoning_content or '' %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- content }}
    {%- endif %}
{%- endfor %}"""
DEEPSEEK_V3 = (
    "{%- set ns = namespace(is_tool=false) %}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{{'<｜User｜>' + message['content']}}{%- endif %}"  # noqa: RUF001
    "{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- set ns.is_tool = false -%}"
    "{%- for tool in message['tool_calls'] %}{{'<｜Assistant｜>' + tool['function']['arguments']}}{%- endfor %}"  # noqa: RUF001
    "{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endif %}"  # noqa: RUF001
    "{%- if message['role'] == 'assistant' and 'tool_calls' not in message %}{% set content = message['content'] %}"
    "{%- if not ns.is_tool %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endif %}"  # noqa: RUF001
    "{%- endfor -%}"
)
GPT_OSS = """{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- "<|start|>assistant<|message|>" + message.content + ("<|return|>" if loop.last else "<|end|>") }}
    {%- elif message.role == 'tool' -%}
        {{- message.content }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}"""
GLM_4 = """[gMASK]<sop>
{%- macro visible_text(content) -%}{{- content }}{%- endmacro -%}
{%- set ns = namespace(last_user_index=2) %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = m.reasoning_content or '' %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\\n<think>' + reasoning_content + '</think>' }}
{%- endif -%}
{{ '\\n' + m.content -}}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{{ '\\n<tool_call>' + tc.function.name }}
</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
    {{- '<|observation|>' }}
{%- endif %}
{{- '\\n' + m.content }}
{%- else -%}
<|observation|>{% for tr in m.content %}{{ tr }}{% endfor -%}
{% endif -%}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}"""
ASKED = [user("q"), assistant("a", reasoning_content="so"), user("r"), assistant("b", reasoning_content="ah")]
FAMILIES = {
    "Qwen2.5": (
        QWEN_2_5,
        "<|im_start|>user\n  q<|im_end|>\n  <|im_start|>assistant[[\n  a<|im_end|>\n  ]]"
        "<|im_start|>user\n  r<|im_end|>\n  <|im_start|>assistant[[\n  b<|im_end|>\n  ]]",
    ),
    "Qwen3": (
        QWEN_3,
        "".join(
            f"<|im_start|>user\n  {asked}<|im_end|>\n  <|im_start|>assistant\n  [[<think>\n  {thought}\n  "
            f"</think>\n  \n  {said}<|im_end|>\n  ]]"
            for asked, thought, said in (("q", "so", "a"), ("r", "ah", "b"))
        ),
    ),
    "DeepSeek-V3": (
        DEEPSEEK_V3,
        "<｜User｜>q[[<｜Assistant｜>a<｜end▁of▁sentence｜>]]<｜User｜>r[[<｜Assistant｜>b<｜end▁of▁sentence｜>]]",  # noqa: RUF001
    ),
    "GLM-4": (
        GLM_4,
        "[gMASK]<sop><|user|>\n  q<|assistant|>[[\n  a<|user|>]]\n  r"
        "<|assistant|>[[\n  <think>ah</think>\n  b<|user|>]]",
    ),
    "gpt-oss": (
        GPT_OSS,
        "<|start|>user<|message|>q<|end|>[[<|start|>assistant<|message|>a<|end|>]]"
        "<|start|>user<|message|>r<|end|>[[<|start|>assistant<|message|>b<|return|>]]",
    ),
}


def test_a_known_family_has_its_training_template() -> None:
    """Prefix differences would give none of these: reasoning is dropped, or a later turn has another end."""
    for family in FAMILIES:
        print(family)
        template, expected = FAMILIES[family]
        assert text_of(ASKED, template) == expected
        assert family in learned_words(coder(template, False))


TEMPLATES = importlib.util.find_spec("trl")


@pytest.mark.skipif(TEMPLATES is None, reason="trl is not installed")
def test_the_masks_are_those_of_trl_for_at_least_twenty_families() -> None:
    assert TEMPLATES is not None and TEMPLATES.origin is not None
    folder, equal = Path(TEMPLATES.origin).parent / "chat_templates", set()
    for path in folder.glob("*_training.jinja"):
        family = path.name.removesuffix("_training.jinja")
        by, masks = coder((folder / f"{family}.jinja").read_text(encoding="utf-8"), True), []
        for name in ("several turns, the last one empty", "the user last", "a call"):
            messages = [*CHATS[name][:3], assistant("b")] if name[0] == "s" else CHATS[name]
            try:
                trained = by.apply_chat_template(
                    messages, chat_template=path.read_text(encoding="utf-8"), tokenize=True, return_dict=True,
                    return_assistant_tokens_mask=True,
                )  # fmt: skip
            except (TemplateError, TypeError):
                continue  # the family has no tools, or its messages are lists
            try:
                masks.append(
                    encode_chat(Chat(family, messages), by)
                    == (trained["input_ids"], [*map(bool, trained["assistant_masks"])])
                )
            except ConfigError:
                masks.append(False)
        if masks and all(masks):
            equal.add(family)
    assert (
        len(equal) >= 20 and {"qwen2_5", "qwen3", "llama3", "gemma", "phi3", "deepseekv3", "gptoss", "glm4moe"} <= equal
    )


# -- the example ---------------------------------------------------------------------------------------


def test_an_example_shows_nothing_that_a_terminal_obeys() -> None:
    by = tokenizer(MARKING_TEMPLATE)
    hostile = "\x1b]0;title\x07\x9b31m\u202eabc\r\x00 é 好\nend"
    shown = str(Example.of(*encode_chat(Chat("", [user(hostile), assistant("yes")]), by), by))
    assert shown == (r"<|user|>\x1b]0;title\x07\x9b31m\u202eabc\r\x00 é 好" + "\n  end<|assistant|>[[yes</s>]]")
    assert not any(each in shown for each in "\x1b\x07\x9b\u202e\r\x00")
    assert visible_text("a\u00a0b\u2028c\tend") == r"a\xa0b\u2028c\tend"
