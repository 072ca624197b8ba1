"""How each family of models writes its calls: a writer of each form, made after its source and not after our parsers.

A source is the family's own tokenizer, renderer or chat template; where models are known to write more than these do,
it is an engine that reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from minivllm.serve.tools.parsers import ArrayParser


def dumps(value, **kwargs):
    return json.dumps(value, ensure_ascii=False, **kwargs)


def objects(calls, name="name", arguments="arguments", **kwargs):
    return [dumps({name: n, arguments: a}, **kwargs) for n, a in calls]


def listed(calls, *keys):
    return f"[{', '.join(objects(calls, *keys))}]"


def hermes(calls, before, after):
    written = [f"<tool_call>\n{call}\n</tool_call>" for call in objects(calls)]
    return before + "\n".join(written) + after


def llama(calls, before, after):
    return "; ".join(objects(calls, "name", "parameters", indent=1))


def mistral(calls, before, after):
    return before + "[TOOL_CALLS] " + listed(calls) + after


def mistral_v11(calls, before, after):
    return before + "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls) + after


def mistral_id(calls, before, after):
    written = [f"[TOOL_CALLS]{n}[CALL_ID]a1B2c3D4{i}[ARGS]{dumps(a)}" for i, (n, a) in enumerate(calls)]
    return before + "".join(written) + after


def llama_meta(calls, before, after):
    return "; ".join(dumps({"type": "function", "name": n, "x": [{}], "parameters": a, "y": None}) for n, a in calls)


def llama_function(calls, before, after):
    return before + "".join(f"<function={n}>{dumps(a)}</function>" for n, a in calls) + after


def phi_tokens(calls, before, after):
    return f"{before}<|tool_call|>{listed(calls)}<|/tool_call|>{after}"


def array(calls, before, after):
    return listed(calls, "name", "parameters")


def granite(calls, before, after):
    return f"{before}<|tool_call|>{listed(calls)}{after}"


def granite_20b(calls, before, after):
    return before + "\n".join(f"<function_call> {call}" for call in objects(calls)) + after


def internlm(calls, before, after):
    written = [f"<|action_start|><|plugin|>\n{call}<|action_end|>\n" for call in objects(calls, "name", "parameters")]
    return before + "".join(written) + after


def phi(calls, before, after):
    return f"{before}functools{listed(calls)}{after}"


def cohere(calls, before, after):
    return f"{before}<|START_ACTION|>{listed(calls, 'tool_name', 'parameters')}<|END_ACTION|>{after}"


def cohere_fence(calls, before, after):
    return f"{before}\nAction: ```json\n{listed(calls, 'tool_name', 'parameters')}\n```{after}"


def deepseek(calls, before, after):
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    written = [f"{begin}function{sep}{n}\n```json\n{dumps(a)}\n```{end}" for n, a in calls]
    return before + "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>" + after


def deepseek_v31(calls, before, after):
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    written = [f"{begin}{n}{sep}{dumps(a)}{end}" for n, a in calls]
    return before + "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>" + after


def kimi(calls, before, after):
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    written = [f"{begin}functions.{n}:{i}{middle}{dumps(a)}{end}" for i, (n, a) in enumerate(calls)]
    return before + "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>" + after


def harmony(calls, before, after):
    said = [f"<|channel|>commentary<|message|>{before}<|end|>"] if before else []
    for name, arguments in calls:
        to = f"commentary to=functions.{name} <|constrain|>json"
        said.append(f"<|channel|>{to}<|message|>{dumps(arguments)}<|call|>")
    said += [f"<|channel|>final<|message|>{after}<|return|>"] if after else []
    return "<|channel|>analysis<|message|>Hm <|.<|end|><|start|>assistant" + "<|start|>assistant".join(said)


def harmony_bare(calls, before, after):
    return harmony(calls, before, after).replace("to=functions.", "to=")


def harmony_analysis(calls, before, after):
    return harmony(calls, before, after).replace("commentary to=functions.", "analysis to=")


def harmony_bare_role(calls, before, after):
    return harmony_role(calls, before, after).replace("to=functions.", "to=")


def harmony_role(calls, before, after):
    written = [f" to=functions.{n}<|channel|>commentary json<|message|>{dumps(a)}<|call|>" for n, a in calls]
    return "<|start|>assistant".join(written)


def as_text(value):
    return value if isinstance(value, str) else dumps(value)


def qwen3_coder(calls, before, after):
    for name, arguments in calls:
        values = [f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items()]
        before += f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>\n"
    return before + after


def glm(calls, before, after, gap="\n"):
    for name, arguments in calls:
        before += f"<tool_call>{name}{gap}"
        for key, value in arguments.items():
            before += f"<arg_key>{key}</arg_key>{gap}<arg_value>{as_text(value)}</arg_value>{gap}"
        before += "</tool_call>"
    return before + after


def glm47(calls, before, after):
    return glm(calls, before, after, gap="")


def dsml(calls, before, after, section="function_calls"):
    written = []
    for name, arguments in calls:
        values = [
            f'<｜DSML｜parameter name="{key}" string="{dumps(isinstance(value, str))}">{as_text(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        ]
        written.append(f'<｜DSML｜invoke name="{name}">\n{"".join(values)}</｜DSML｜invoke>\n')
    return f"{before}<｜DSML｜{section}>\n{''.join(written)}</｜DSML｜{section}>{after}"


def dsml_v4(calls, before, after):
    return dsml(calls, before, after, "tool_calls")


def dsml_json(calls, before, after):
    written = [f'<｜DSML｜invoke name="{n}">\n{dumps(a)}\n</｜DSML｜invoke>\n' for n, a in calls]
    return f"{before}<｜DSML｜function_calls>\n{''.join(written)}</｜DSML｜function_calls>{after}"


def pythonic(calls, before, after):
    written = [f"{n}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for n, a in calls]
    return f"[{', '.join(written)}]"


def llama_method(calls, before, after):
    written = [f"<|python_tag|>{n}.call({', '.join(f'{key}={value!r}' for key, value in a.items())})" for n, a in calls]
    return before + "".join(written)


def llama4(calls, before, after):
    return f"{before}<|python_start|>{pythonic(calls, '', '')}<|python_end|>{after}"


def without(write, *tags):
    """What a model writes that forgets these."""

    def written(calls, before, after):
        text = write(calls, before, after)
        for tag in tags:
            text = text.replace(tag, "")
        return text

    return written


def harmony_empty(calls, before, after):
    return harmony(calls, before, after).replace("<|message|>{}<|call|>", "<|message|><|call|>")


deepseek_bare = without(deepseek, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
kimi_bare = without(kimi, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
dsml_bare = without(dsml_v4, "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
FORGETFUL = "without the section's tags, which models forget (llama.cpp, common/chat.cpp)"


@dataclass(frozen=True)
class Form:
    parser: str | type
    write: Callable[..., str]  # (calls, text before, text behind), the texts where the form has a place for them
    source: str
    is_json: bool = True  # else arguments are of the types of a schema


FORMS = {
    "hermes": Form("hermes", hermes, "Qwen2.5 and Hermes 2 Pro, chat templates"),
    "llama3_json": Form("llama3_json", llama, "Llama 3.1, chat template; several: vLLM, llama_tool_parser.py"),
    "mistral": Form("mistral", mistral, "mistral-common 1.13, InstructTokenizerV2, V3 and V7"),
    "mistral v11": Form("mistral", mistral_v11, "mistral-common 1.13, InstructTokenizerV13, and V11 without an id"),
    "mistral id": Form("mistral", mistral_id, "mistral-common 1.13, InstructTokenizerV11"),
    "llama3_json meta": Form(
        "llama3_json", llama_meta, "meta-llama/llama-models, ToolUtils.encode_tool_call: json, with members of others"
    ),
    "llama3_json function": Form("llama3_json", llama_function, "the same: function_tag"),
    "phi4_mini_json tokens": Form("phi4_mini_json", phi_tokens, "Phi-4-mini, special tokens"),
    "qwen3_coder JSON": Form("qwen3_coder", hermes, "Qwen 3, chat template"),
    "deepseek_v32 JSON": Form("deepseek_v32", dsml_json, "SGLang, deepseekv32_detector.py"),
    "array": Form(ArrayParser, array, "this server: tool_choice required"),
    "granite": Form("granite", granite, "Granite 3.0, chat template"),
    "granite-20b-fc": Form("granite-20b-fc", granite_20b, "vLLM, granite_20b_fc_tool_parser.py"),
    "internlm": Form("internlm", internlm, "InternLM 2.5, chat template"),
    "phi4_mini_json": Form("phi4_mini_json", phi, "vLLM, tool_chat_template_phi4_mini.jinja"),
    "cohere_command": Form("cohere_command", cohere, "Command R7B, chat template"),
    "cohere_command fence": Form("cohere_command", cohere_fence, "Command R, tool_use template"),
    "deepseek_v3": Form("deepseek_v3", deepseek, "DeepSeek V3 and R1, chat templates"),
    "deepseek_v31": Form("deepseek_v3", deepseek_v31, "DeepSeek V3.1, chat template"),
    "kimi_k2": Form("kimi_k2", kimi, "Kimi K2, chat template"),
    "openai": Form("openai", harmony, "openai/harmony, render_conversation: the recipient in the channel"),
    "openai role": Form("openai", harmony_role, "gpt-oss, chat template: the recipient in the role"),
    "openai bare": Form("openai", harmony_bare, "gpt-oss in long contexts; vLLM, openai_tool_parser.py"),
    "openai bare role": Form("openai", harmony_bare_role, "the same, in the role"),
    "openai analysis": Form("openai", harmony_analysis, "the same, in the channel of the thinking"),
    "openai empty": Form("openai", harmony_empty, "a function without parameters: gpt-oss writes no object"),
    "deepseek_v3 bare": Form("deepseek_v3", deepseek_bare, FORGETFUL),
    "kimi_k2 bare": Form("kimi_k2", kimi_bare, FORGETFUL),
    "deepseek_v32 bare": Form("deepseek_v32", dsml_bare, FORGETFUL, is_json=False),
    "qwen3_coder": Form("qwen3_coder", qwen3_coder, "Qwen 3 Coder, chat template", is_json=False),
    "glm45": Form("glm45", glm, "GLM 4.5, chat template", is_json=False),
    "glm47": Form("glm45", glm47, "GLM 4.7, chat template", is_json=False),
    "deepseek_v32": Form("deepseek_v32", dsml, "DeepSeek V3.2, encoding_dsv32.py", is_json=False),
    "deepseek_v4": Form("deepseek_v32", dsml_v4, "DeepSeek V4; vLLM, test_format_conformance.py", is_json=False),
    "llama3_json method": Form(
        "llama3_json",
        llama_method,
        "the same, of tools that the model has been trained on; Llama 3.1, chat template",
        is_json=False,
    ),
    "pythonic": Form("pythonic", pythonic, "Llama 3.2, template of vLLM; llama-models: python_list", is_json=False),
    "llama4_pythonic": Form("pythonic", llama4, "Llama 4, chat template", is_json=False),
}
