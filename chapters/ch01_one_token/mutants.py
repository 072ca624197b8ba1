"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "reads the scores after the first token": ("logits_of(text)[-1]", "logits_of(text)[0]"),
    "forgets what it has said": ("logits_of(text)[-1]", "logits_of(prompt)[-1]"),
    "forgets what it was asked": ("logits_of(text)[-1]", "logits_of(text[-1:])[-1]"),
    "writes into the caller's prompt": ("text, new = list(prompt), []", "text, new = prompt, []"),
    "runs past a stop token": ("if token in stop_ids:", "if token in prompt:"),
    "drops the stop token": (
        "        text.append(token)\n",
        "        if token in stop_ids:\n            break\n        text.append(token)\n",
    ),
    "gives one token too many": ("range(max_new)", "range(max_new + 1)"),
    "gives the prompt back too": ("return new", "return text"),
}
