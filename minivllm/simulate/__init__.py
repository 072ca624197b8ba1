"""A device that is not there: how long a step of a model would take on it, from data. No torch here.

Everything but the forward is the engine's own: API, tokenizer, scheduler, KV manager, router, core and plans. A
simulated worker (worker.py) answers the same plans as a real one, with tokens of no meaning, and takes as long as the
device would (cost.py, devices.py). Others write the scheduler anew for a simulator and drift from it (Vidur,
LLMServingSim), or reach into it by hooks (SGLang's, Revati); here it is one more worker behind the executor.
"""
