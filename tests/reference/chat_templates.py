"""Chat templates in the styles of published models, and conversations, for test_chat.py and
verify_chat.py."""

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""

LLAMA_2 = """\
{%- if messages[0].role == 'system' -%}
    {%- set first = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set first, turns = '', messages -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') -}}
    {%- endif -%}
    {%- if turn.role == 'user' -%}
        {{- bos_token + '[INST] ' + (first if loop.first else '') + turn.content | trim + ' [/INST]' -}}
    {%- else -%}
        {{- ' ' + turn.content.strip() + ' ' + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""

LLAMA_3 = """\
{{- bos_token }}
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y') %}
{%- macro header(role) -%}
<|start_header_id|>{{ role }}<|end_header_id|>

{% endmacro %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- header('system') }}
{{- 'Today Date: ' + date + '\\n\\n' }}
{%- if tools is not none %}
    {{- 'You have these functions:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model supports only single tool calls') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- header('assistant') }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role in ['tool', 'ipython'] %}
        {{- header('ipython') }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- header(message.role) + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header('assistant') }}
{%- endif %}
"""

MISTRAL = """\
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list -%}
{%- set turns = messages | rejectattr('role', 'equalto', 'system') | list -%}
{%- set ns = namespace(index=0) -%}
{%- for turn in turns -%}
    {%- if turn.role in ('user', 'assistant') and not turn.get('tool_calls') -%}
        {%- if (turn.role == 'user') != (ns.index % 2 == 0) -%}
            {{- raise_exception('After the optional system message, roles must alternate user and assistant') -}}
        {%- endif -%}
        {%- set ns.index = ns.index + 1 -%}
    {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for turn in turns -%}
    {%- if turn.role == 'user' -%}
        {%- if loop.last and tools -%}
            {{- '[AVAILABLE_TOOLS] ' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST] ' ~ (system[0] ~ '\\n\\n' if loop.last and system else '') ~ turn.content ~ '[/INST]' -}}
    {%- elif turn.role == 'assistant' and turn.tool_calls is defined -%}
        {{- '[TOOL_CALLS] ' ~ turn.tool_calls | map(attribute='function') | list | tojson ~ eos_token -}}
    {%- elif turn.role == 'assistant' -%}
        {{- ' ' ~ turn.content | trim ~ eos_token -}}
    {%- elif turn.role == 'tool' -%}
        {{- '[TOOL_RESULTS] ' ~ {'content': turn.content} | tojson ~ '[/TOOL_RESULTS]' -}}
    {%- else -%}
        {{- raise_exception('Only user, assistant and tool roles are supported; got ' ~ turn.role) -}}
    {%- endif -%}
{%- endfor -%}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for part in message['content'] if part['type'] == 'text' -%}
            {{ part['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

PHI_3 = """\
{% for message in messages %}{% if message['role'] == 'system' %}\
{{ '<|system|>\\n' + message['content'] + '<|end|>\\n' }}\
{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '<|end|>\\n' }}\
{% elif message['role'] == 'assistant' %}{% generation %}{{ '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}\
{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}\
{% else %}{{ eos_token }}{% endif %}
"""

QWEN_3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
        {%- continue %}
    {%- endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {%- set call = call.function if call.function else call %}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

RETRIEVAL = """\
{{ bos_token }}{% for message in messages if message.role != 'system' %}
{% if loop.last and documents %}
<results>
{% for document in documents %}
Document: {{ loop.index0 }}
{% for key, value in document | dictsort %}
{{ key | capitalize }}: {{ value | indent(2) }}
{% endfor %}
{% if not loop.last %}{{ '\\n' }}{% endif %}
{% endfor %}
</results>
{% endif %}
<|{{ message.role | upper }}|>{{ message.content | replace('\\r', '') | default('', true) }}
{% if message.role == 'user' and loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ '%s has %d messages' | format('This', messages | length) }}, {{ 2 ** 3 * 5 % 7 }}; {{ 'x' * 3 }}{{ [1] + [2] }}
"""

# {style: (template, the special tokens of tokenizer_config.json)}
TEMPLATES = {
    "chatml": (CHATML, {"bos_token": None, "eos_token": "<|im_end|>"}),
    "llama-2": (LLAMA_2, {"bos_token": "<s>", "eos_token": "</s>"}),
    "llama-3": (LLAMA_3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "mistral": (MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}),
    "gemma": (GEMMA, {"bos_token": "<bos>", "eos_token": "<eos>"}),
    "phi-3": (PHI_3, {"bos_token": "<s>", "eos_token": "<|endoftext|>"}),
    "qwen-3": (QWEN_3, {"bos_token": None, "eos_token": "<|im_end|>"}),
    "zephyr": (ZEPHYR, {"bos_token": "<s>", "eos_token": "</s>"}),
    "retrieval": (RETRIEVAL, {"bos_token": "<BOS>", "eos_token": "<EOS>"}),
}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a city, e.g. <Köln> & "Paris"',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
}

_USER, _ANSWER = (
    {"role": "user", "content": "  Who wrote <The Tempest>?\n"},
    "Shakespeare, naïvely “by hand” 🎭 ",
)
_SYSTEM = {"role": "system", "content": "Answer\nbriefly."}
_MORE = {"role": "user", "content": "When?"}

# {conversation: (messages, options of render)}
CONVERSATIONS = {
    "one message": ([_USER], {}),
    "the answer begins": ([_USER], {"add_generation_prompt": True}),
    "three messages": (
        [_USER, {"role": "assistant", "content": _ANSWER}, _MORE],
        {"add_generation_prompt": True},
    ),
    "with a system message": (
        [_SYSTEM, _USER, {"role": "assistant", "content": _ANSWER}, _MORE],
        {"add_generation_prompt": True},
    ),
    "wrong order": ([{"role": "assistant", "content": _ANSWER}, _USER], {}),
    "thoughts in the text": (
        [_USER, {"role": "assistant", "content": f"<think>\nHm.\n</think>\n\n{_ANSWER}"}],
        {},
    ),
    "thoughts in a field": (
        [_USER, {"role": "assistant", "content": _ANSWER, "reasoning_content": "Hm."}],
        {},
    ),
    "thoughts in an old field": (
        [_USER, {"role": "assistant", "content": _ANSWER, "reasoning": "Hm."}],
        {},
    ),
    "without thinking": ([_USER], {"add_generation_prompt": True, "enable_thinking": False}),
    "tools": ([_SYSTEM, _USER], {"tools": [TOOL], "add_generation_prompt": True}),
    "a call of a tool": (
        [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "weather", "content": "Rain: 3 °C"},
        ],
        {"tools": [TOOL, TOOL], "add_generation_prompt": True},
    ),
    "documents": (
        [_USER],
        {"documents": [{"title": "Plays", "text": "One\ntwo"}, {"title": "Ä", "text": "b"}]},
    ),
    "parts": (
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": " What is this? "}, {"type": "image"}],
            }
        ],
        {},
    ),
    "another role": ([{"role": "critic", "content": "No."}], {}),
    "an answer is continued": (
        [_USER, {"role": "assistant", "content": '{"author": ['}],
        {"continue_final_message": True},
    ),
    "after a space": (
        [_USER, {"role": "assistant", "content": _ANSWER}],
        {"continue_final_message": True},
    ),
    "a question is continued": ([_USER], {"continue_final_message": True}),
    "an empty answer is continued": (
        [_USER, {"role": "assistant", "content": ""}],
        {"continue_final_message": True},
    ),
    "thoughts are continued": (
        [_USER, {"role": "assistant", "content": "", "reasoning_content": "Hm, perhaps"}],
        {"continue_final_message": "reasoning_content"},
    ),
    "after thoughts": (
        [_USER, {"role": "assistant", "content": f"<think>\nHm.\n</think>\n\n{_ANSWER}"}],
        {"continue_final_message": True},
    ),
    "parts are continued": (
        [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "image"}]}],
        {"continue_final_message": True},
    ),
    "nothing to continue": (
        [_USER, {"role": "assistant", "content": None}],
        {"continue_final_message": True},
    ),
    "neither": ([_USER], {"continue_final_message": True, "add_generation_prompt": True}),
}
DATE = {"date_string": "26 Jul 2026"}
