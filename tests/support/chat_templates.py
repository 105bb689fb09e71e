"""Chat templates in the style of known families, a small tokenizer that has their special tokens, and random chats.

The templates are written for these tests. Each has the structure that makes its family special: where tools stand, what
happens to the reasoning of earlier turns, which token ends a turn, how it depends on the last turn.
"""

import json
import random
from pathlib import Path
from typing import Any

# Reasoning only behind the last question, tools in the system turn, tool results in turns of the user.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Headers of roles, trimmed contents, today's date, one tool call a turn, nothing dropped.
LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- message.content | tojson if message.content is mapping else message.content }}{{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message and message.tool_calls %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one tool call a turn") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim }}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# Roles alternate, tools and the system prompt stand before the last question, an answer ends with the end token.
MISTRAL = """
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set chat = messages[1:] %}
{%- else %}{%- set system = "" %}{%- set chat = messages %}{%- endif %}
{%- set asked = chat | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in chat %}
    {%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
        {%- if (message.role == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in chat %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and message == asked[-1] %}
            {{- "[AVAILABLE_TOOLS][" }}
            {%- for tool in tools %}{{- tool | tojson }}{{- ", " if not loop.last else "" }}{%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST]" }}{{- system + "\\n\\n" if system and message == asked[-1] else "" }}
        {{- message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for call in message.tool_calls %}
            {{- {"name": call.function.name, "arguments": call.function.arguments} | tojson(sort_keys=true) }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""

# The prompt opens the reasoning, which answers of earlier turns, and of data without reasoning, have not.
DEEPSEEK = """
{%- set ns = namespace(system='', is_tool=false) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- set ns.system = ns.system + message.content %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<|Assistant|>' }}
        {%- for call in message.tool_calls %}
            {{- '<|tool_call|>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments | tojson }}{{- '\\n```' }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}{{- '<|tool_output|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<|Assistant|>' + content + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
"""

# Macros, channels, reasoning of calls up to the final answer and of the last answer, which ends otherwise than others.
GPT_OSS = """
{%- macro named(tools) %}
    {%- for tool in tools %}{{- "type " + tool.function.name + " = (_: " }}
        {{- tool.function.parameters.properties | default({}) | tojson(separators=(',', ':')) }}{{- ") => any;\\n" }}
    {%- endfor %}
{%- endmacro %}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") + "\\nReasoning: " }}
{{- reasoning_effort | default("medium") }}{{- "<|end|>" }}
{%- if messages[0].role in ["developer", "system"] %}
    {%- set developer = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer = "" %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|>" + developer }}
    {%- if tools %}{{- "\\n# Tools\\n" }}{{- named(tools) }}{%- endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set ns = namespace(called=none) %}
{%- for message in loop_messages %}
    {%- if message.role == 'assistant' %}
        {%- set later = namespace(final=false) %}
        {%- for after in loop_messages[loop.index:] %}
            {%- if after.role == 'assistant' and "tool_calls" not in after %}{%- set later.final = true %}{%- endif %}
        {%- endfor %}
        {%- set thought = "<|start|>assistant<|channel|>analysis<|message|>" + (message.thinking or "") + "<|end|>" %}
        {%- if "tool_calls" in message %}
            {{- thought if message.thinking and not later.final }}
            {%- set call = message.tool_calls[0].function %}{%- set ns.called = call.name %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- "<|call|>" }}
        {%- elif loop.last and not add_generation_prompt %}
            {{- thought if message.thinking }}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if ns.called is none %}{{- raise_exception("a result without a call") }}{%- endif %}
        {{- "<|start|>functions." + ns.called + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson }}{{- "<|end|>" }}
    {%- else %}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""

# What the assistant says is marked by the template itself.
MARKED = """
{%- for message in messages %}
    {%- if loop.index0 > 100 %}{%- break %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content or '' }}{{- '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TEMPLATES = {
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "gpt-oss": GPT_OSS,
    "marked": MARKED,
}
SPECIAL = [
    *("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<|User|>", "<|Assistant|>", "<|tool_call|>", "<|tool_output|>", "<|start|>", "<|message|>"),
    *("<|end|>", "<|return|>", "<|call|>", "<|channel|>"),
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]  # no special ones
WORDS = ["the cat", " sat", "on  two\n\nlines", "2 + 2?", "größe", "日本", "🙂", "{}", "\n", " x ", "a" * 30, "</b>"]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> numbers & more",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


def save_tokenizer(folder: Path, template: str | None = None, spaces: bool = False) -> Path:
    """Write a BPE tokenizer with all special tokens, as `transformers` saves one.

    It is byte-level, as those of Qwen3 and Llama 3 are; with `spaces` it puts a space before the first word and falls
    back to bytes, as those that come from SentencePiece do.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None, byte_fallback=spaces))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = list(SPECIAL)
    if spaces:
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(n) for n in range(32, 127)]
        special += [f"<0x{n:02X}>" for n in range(256)]
    else:
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500 + 256 * spaces, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the cat sat on the mat\n\n, assistant user system\n"] * 9 + WORDS, trainer)
    made.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ADDED])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def some_text(draw: random.Random) -> str:
    return "".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 6)))


def random_record(draw: random.Random, tools: bool, reasoning: bool) -> dict[str, Any]:
    """A conversation that every template takes: turns alternate, and a tool is called at most once between them."""
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": some_text(draw)})
    for _ in range(draw.randrange(1, 4)):
        messages.append({"role": "user", "content": some_text(draw)})
        if tools and draw.random() < 0.5:
            arguments = {"a": draw.randrange(9), "b": some_text(draw)}
            call = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": arguments}}
            thought = {"reasoning_content": some_text(draw)} if reasoning else {}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call], **thought})
            messages.append({"role": "tool", "content": some_text(draw), "name": "add", "tool_call_id": "call00001"})
        answer: dict[str, Any] = {"role": "assistant", "content": some_text(draw)}
        if reasoning and draw.random() < 0.7:
            answer[draw.choice(("reasoning_content", "thinking", "reasoning"))] = some_text(draw)
        messages.append(answer)
    record: dict[str, Any] = {"messages": messages}
    if tools:
        record["tools"] = [TOOL]
    return json.loads(json.dumps(record))  # type: ignore[no-any-return]
