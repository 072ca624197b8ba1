"""THE feature table: one row an axis. It drives `--set`, `--help`, `python -m minivllm features`, validation, the
conformance matrix, the ablations and the chapters. Adding a feature starts here.

Options of an axis are names in a registry (or plain values); conflicts are declared here with their reason and raised
by `EngineConfig.build`. A pair of options that fails and is not declared fails CI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.registry import Registry


@dataclass(frozen=True, slots=True)
class Feature:
    name: str
    field: str  # the dotted configuration field
    options: tuple[Any, ...]
    default: Any
    what: str
    chapter: str = ""
    workload: str = ""
    metric: str = ""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two options that cannot meet."""

    first: tuple[str, Any]  # (feature name, option)
    second: tuple[str, Any]
    reason: str


SCHEDULERS: Registry = Registry(
    "scheduler.kind",
    {
        "unified": "minivllm.scheduler.unified:UnifiedScheduler",
        "phased": "minivllm.scheduler.phased:PhasedScheduler",
        "static": "minivllm.scheduler.static:StaticScheduler",
    },
)
ADMISSIONS: Registry = Registry(
    "scheduler.admission",
    {
        "all": "minivllm.scheduler.admission:AdmitAll",
        "watermark": "minivllm.scheduler.admission:Watermark",
        "full_prompt": "minivllm.scheduler.admission:FullPrompt",
        "peak": "minivllm.scheduler.admission:PredictedPeak",
        "reserve_all": "minivllm.scheduler.reserve:ReserveAll",
        "reserve_prompt": "minivllm.scheduler.reserve:ReservePrompt",
        "reserve_share": "minivllm.scheduler.reserve:ReserveShare",
    },
)
ALLOCATIONS: Registry = Registry(
    "kv.allocation",
    {
        "paged": "minivllm.engine.build.kv:build_paged",
        "max": "minivllm.engine.build.kv:build_max",
        "pow2": "minivllm.engine.build.kv:build_pow2",
        "oracle": "minivllm.engine.build.kv:build_oracle",
    },
)
PREEMPTIONS: Registry = Registry(
    "kv.preemption",
    {"recompute": "minivllm.kv.swap:Recompute", "swap": "minivllm.kv.swap:Swap", "auto": "minivllm.kv.swap:Auto"},
)
POLICIES: Registry = Registry(
    "scheduler.policy",
    {
        "fcfs": "minivllm.scheduler.policy:FCFS",
        "priority": "minivllm.scheduler.policy:Priority",
        "fair": "minivllm.scheduler.fair:Fair",
        "decodes_first": "minivllm.scheduler.policy:DecodesFirst",
        "longest_prefix": "minivllm.scheduler.longest_prefix:LongestPrefix",
        "served_ratio": "minivllm.scheduler.gather:ServedRatio",
        "half_full": "minivllm.scheduler.gather:HalfFull",
    },
)
PREFIX_INDEXES: Registry = Registry(
    "kv.prefix",
    {
        "none": "minivllm.kv.prefix:NoPrefix",
        "hash": "minivllm.kv.prefix_hash:HashPrefix",
        "radix": "minivllm.kv.prefix_radix:RadixPrefix",
    },
)
KEY_HASHES: Registry = Registry(
    "kv.hash",
    {"sha256_cbor": "minivllm.kv.prefix_hash:sha256_cbor", "xxhash_cbor": "minivllm.kv.prefix_hash:xxhash_cbor"},
)
INPUT_BUILDERS: Registry = Registry(
    "runner.inputs",
    {
        "rebuild": "minivllm.runner.inputs_rebuild:RebuildInputs",
        "persistent": "minivllm.runner.inputs_persistent:PersistentInputs",
        "gather": "minivllm.runner.inputs_gather:GatherInputs",
    },
)
DEVICE_INPUT_BUILDERS: Registry = Registry(
    "runner.inputs on a device", {"gather": "minivllm.runner.inputs_place:gather_on_device"}
)
ATTENTION: Registry = Registry(
    "runner.attention",
    {
        "cpu": "minivllm.attention.cpu:CPUAttention",
        "reference": "minivllm.attention.reference:ReferenceAttention",
        "sdpa": "minivllm.attention.sdpa:SDPAAttention",
        "flex": "minivllm.attention.flex:FlexBackend",
        "triton": "minivllm.attention.triton:TritonAttention",
        "flash": "minivllm.attention.flash:FlashBackend",
        "flashinfer": "minivllm.attention.flashinfer:FlashInferBackend",
    },
    pair="minivllm.attention.composite:pair",
)
# Of models whose layers keep a latent vector a token; a name that is missing here keeps K and V of each head.
LATENT_ATTENTION: Registry = Registry(
    "runner.attention of latent layers",
    {
        "cpu": "minivllm.attention.latent_cpu:LatentCPU",
        "reference": "minivllm.attention.latent:LatentReference",
    },
)
# Of layers with a recurrent state; a name that is missing here has products in plain torch for them.
STATE_ATTENTION: Registry = Registry(
    "runner.attention of recurrent layers",
    {
        "cpu": "minivllm.attention.state_cpu:StateCPU",
        "sdpa": "minivllm.attention.state:StateChunked",
        "reference": "minivllm.attention.state:StateReference",
    },
)
# Of layers of cross attention; a name that is missing here has torch's fused kernel for them.
CROSS_ATTENTION: Registry = Registry(
    "runner.attention of cross layers",
    {
        "sdpa": "minivllm.attention.cross:CrossSDPA",
        "reference": "minivllm.attention.cross:CrossReference",
    },
)
# Of the pairs, those that the feature table and the matrix show: one that a CPU can run, one for a GPU.
ATTENTION_PAIRS = ("flex,reference", "flash,triton")
FORWARDS: Registry = Registry(
    "runner.forward",
    {
        "eager": "minivllm.runner.forward:EagerForward",
        "fused": "minivllm.runner.forward_fused:FusedForward",
        "piecewise": "minivllm.runner.forward_piecewise:PiecewiseForward",
    },
)
GRAPHS: Registry = Registry(
    "runner.graphs",
    {
        "none": "minivllm.runner.forward_graphs:none",
        "piecewise": "minivllm.runner.forward_graphs:piecewise",
        "full": "minivllm.runner.forward_graphs:full",
        "full+piecewise": "minivllm.runner.forward_graphs:full_and_piecewise",
    },
)
PROPOSERS: Registry = Registry(
    "spec_decode.method",
    {
        "none": "minivllm.spec_decode.make:none",
        "ngram": "minivllm.spec_decode.make:ngram",
        "suffix": "minivllm.spec_decode.make:suffix",
        "draft": "minivllm.spec_decode.make:draft",
        "self_draft": "minivllm.spec_decode.make:self_draft",
        "eagle": "minivllm.spec_decode.make:eagle",
        "medusa": "minivllm.spec_decode.make:medusa",
    },
)
ACCEPTANCES: Registry = Registry(
    "spec_decode.acceptance",
    {"match": "minivllm.spec_decode.make:match", "rejection": "minivllm.spec_decode.make:rejection"},
)
EXECUTORS: Registry = Registry(
    "executor.kind",
    {name: "minivllm.executor.uni:UniExecutor" for name in ("uni", "naive", "simulated")},
)
WORKERS: Registry = Registry(  # what builds one, with (config, a decision that was made before torch was there)
    "executor.kind",
    {
        "uni": "minivllm.engine.build.worker:WorkerBuilder",
        "naive": "minivllm.engine.build.naive:NaiveWorkerBuilder",
        "simulated": "minivllm.engine.build.simulated:SimulatedWorkerBuilder",
    },
)
POOLING_WORKERS: Registry = Registry(  # what builds a worker that pools, instead of executor.kind's
    "model.task",
    {
        "embed": "minivllm.engine.build.pooling:PoolingWorkerBuilder",
        "score": "minivllm.engine.build.pooling:PoolingWorkerBuilder",
        "classify": "minivllm.engine.build.pooling:PoolingWorkerBuilder",
    },
)
ROUTERS: Registry = Registry(
    "engine.router",
    {
        "round_robin": "minivllm.engine.routing:RoundRobin",
        "least_loaded": "minivllm.engine.routing:LeastLoaded",
        "prefix": "minivllm.engine.routing:Prefix",
    },
)

GRAMMARS: Registry = Registry(  # structured.backend=auto asks them in this order
    "structured.backend",
    {
        "xgrammar": "minivllm.structured.xgrammar_backend:XGrammarBackend",
        "llguidance": "minivllm.structured.llguidance_backend:LLGuidanceBackend",
        "dfa": "minivllm.structured.dfa:DFABackend",
    },
)

KV_CODES = ("int8", "float8_e4m3fn")  # options of kv.dtype that have scales

FEATURES: tuple[Feature, ...] = (
    Feature(
        "scheduler",
        "scheduler.kind",
        SCHEDULERS.names(),
        "unified",
        "which tokens run next: one {request: num_tokens} budget a step (V1), all prefill, then all decode (V0), or a "
        "batch until its last request has ended (before Orca)",
        chapter="10",
        workload="long_prompt_among_chats",
        metric="itl_p99",
    ),
    Feature(
        "policy",
        "scheduler.policy",
        POLICIES.names(),
        "fcfs",
        "who is served first: arrival order, the request's priority and then arrival order, or clients in turn, by the "
        "tokens that each has had; decodes before prompts (Sarathi-Serve), the longest cached beginning (SGLang); or "
        "arrivals in groups: once enough wait beside those that run (TGI), or half of the places are free (LMDeploy)",
        chapter="10",
        workload="long_prompt_among_chats",
        metric="ttft_p50",
    ),
    Feature(
        "admission",
        "scheduler.admission",
        ADMISSIONS.names(),
        "all",
        "who may start beside those that run: whoever finds room (V1), if 1 % stays free (V0), if its whole prompt "
        "finds room (vLLM's scheduler_reserve_full_isl), if the predicted peak fits (LightLLM); or if room is left for "
        "all that those that run may still write (TGI), for a share of it (SGLang), for their prompts (Sarathi-Serve)",
        chapter="08",
        workload="memory_pressure",
        metric="throughput",
    ),
    Feature(
        "chunked_prefill",
        "scheduler.chunked_prefill",
        (True, False),
        True,
        "a prompt may be computed in pieces, each as large as what the step's budget leaves",
        chapter="10",
        workload="long_prompt_among_chats",
        metric="itl_p99",
    ),
    Feature(
        "allocation",
        "kv.allocation",
        ALLOCATIONS.names(),
        "paged",
        "KV in blocks on demand (PagedAttention), or one contiguous run a request: for the longest, for the output "
        "rounded up to a power of two, for the true length (FasterTransformer, Orca)",
        chapter="06",
        workload="sharegpt",
        metric="kv_used",
    ),
    Feature(
        "kv_dtype",
        "kv.dtype",
        ("auto", "float16", *KV_CODES),
        "auto",
        "how K and V are kept: as the model computes them, rounded to float16 (beside a model in float32: half of the "
        "memory), or in 8 bits (integers, or floats with three bits of fraction) with a scale for each token and head",
        chapter="02",
        workload="memory_pressure",
        metric="throughput",
    ),
    Feature(
        "prefix",
        "kv.prefix",
        PREFIX_INDEXES.names(),
        "hash",
        "reuse the KV blocks of an equal beginning: by chained block hashes (V1), or in a tree (SGLang)",
        chapter="09",
        workload="shared_prefix",
        metric="ttft_p50",
    ),
    Feature(
        "hash",
        "kv.hash",
        KEY_HASHES.names(),
        "sha256_cbor",
        "the hash behind kv.prefix=hash: collision-proof, or faster and keyed with a secret",
        chapter="09",
        workload="shared_prefix",
        metric="host_ms",
    ),
    Feature(
        "fork",
        "kv.fork",
        ("share", "lookup"),
        "lookup",
        "what a forked sequence (a beam; under V0 also n > 1) starts from: its parent's blocks, copied on write (V0), "
        "or what the prefix cache holds of it (V1)",
        chapter="08",
        workload="beam",
        metric="throughput",
    ),
    Feature(
        "preemption",
        "kv.preemption",
        PREEMPTIONS.names(),
        "recompute",
        "what becomes of a preempted request's KV: computed again (V1), moved to host memory (V0), or the cheaper one",
        chapter="08",
        workload="memory_pressure",
        metric="throughput",
    ),
    Feature(
        "inputs",
        "runner.inputs",
        INPUT_BUILDERS.names(),
        "persistent",
        "how a step's tensors come to be: from scratch (V0), by diffs to a persistent batch (V1), or gathered from "
        "rows that a step's changes were written to at once, on a GPU in its memory (vLLM's second runner)",
        chapter="11",
        workload="fixed",
        metric="host_ms",
    ),
    Feature(
        "attention",
        "runner.attention",
        ("auto", *ATTENTION.names(), *ATTENTION_PAIRS),
        "auto",
        "who computes attention over the paged cache (auto: on a CPU C++, on a GPU Triton's kernels if they give the "
        "reference's answer at start); of a pair the first takes requests with one query, the second all others",
        chapter="07",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "kernels",
        "runner.kernels",
        ("auto", "torch", "triton"),
        "auto",
        "who draws tokens, adds adapters, multiplies packed weights, computes experts, rotates, moves blocks and "
        "gathers inputs on a GPU: torch, or a Triton kernel (auto where that gave its reference's answer on the card)",
        chapter="07",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "quantization",
        "model.quantization",
        ("auto", "none", "int8", "int4"),
        "auto",
        "how linear layers keep their weights: auto keeps a GGUF file's blocks of 2 to 8 bits as they are (on a GPU "
        "those of 4), unless dtype=float32 is asked for; "
        "int8 (CPUs only) and int4 round any model's when it is loaded; none computes with all in the model's dtype",
        chapter="03",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "dense_copy",
        "model.dense_copy",
        (True, False),
        True,
        "keep, beside weights in 4 or 8 bits on a CPU, a copy in bf16 for steps of many tokens: faster prefill, more "
        "memory",
        chapter="03",
        workload="fixed",
        metric="ttft_p50",
    ),
    Feature(
        "huge_pages",
        "model.huge_pages",
        (True, False),
        True,
        "move a CPU's packed weights into pages of 2 MiB once the engine serves, where the system has some: each step "
        "looks up fewer",
        chapter="03",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "activation_bits",
        "quantization.activation_bits",
        ("auto", 8, 16),
        "auto",
        "to how many bits a CPU rounds what meets packed weights, with a scale for 32 numbers: 16 change no answer, 8 "
        "are llama.cpp's and multiply batches and prompts faster; auto is 16, or nothing is rounded where "
        "dtype=float32 is asked for",
        chapter="03",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "invariant",
        "model.invariant",
        (False, True),
        False,
        "a request's numbers depend on the request alone, bit for bit: not on who runs beside it, how its prompt is "
        "cut, what is cached or preempted (on a CPU; products by row, no copy in bf16). Where that costs nothing it "
        "holds anyway, and the start-up table says so",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "forward",
        "runner.forward",
        ("auto", *FORWARDS.names()),
        "auto",
        "how the model's forward is called: as it is written, with its small operations in C++ (fused; auto where it "
        "can), or as a graph cut into pieces at attention",
        chapter="14",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "compile",
        "runner.compile",
        ("off", "background", "wait"),
        "off",
        "when the pieces are compiled: never, while requests are served eagerly, or before the first token",
        chapter="14",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "graphs",
        "runner.graphs",
        GRAPHS.names(),
        "none",
        "which forwards are captured once for each size and replayed without the host's work (CUDA graphs; on a CPU "
        "recorded calls that assert what a graph needs): what lies between two attentions, whole decode steps, or both",
        chapter="14",
        workload="fixed",
        metric="tpot_p50",
    ),
    Feature(
        "spec_decode",
        "spec_decode.method",
        PROPOSERS.names(),
        "none",
        "who guesses the next tokens, so that one forward can check several: nobody, a look-up of what followed the "
        "text's last tokens before (ngram: in the request itself; suffix: in earlier outputs too, by frequency), a "
        "smaller model (draft), the model's first layers (self_draft), heads on its hidden states (eagle, medusa)",
        chapter="15",
        workload="fixed",
        metric="tpot_p50",
    ),
    Feature(
        "acceptance",
        "spec_decode.acceptance",
        ACCEPTANCES.names(),
        "match",
        "which guesses become output: those that the request's own draw gives (the same tokens as without), or by "
        "rejection sampling (other tokens, the same distribution)",
        chapter="15",
        workload="fixed",
        metric="tpot_p50",
    ),
    Feature(
        "adaptive",
        "spec_decode.adaptive",
        (True, False),
        True,
        "guess less, down to nothing, where a forward over more tokens takes longer than the guesses save",
        chapter="15",
        workload="fixed",
        metric="tpot_p50",
    ),
    Feature(
        "executor",
        "executor.kind",
        EXECUTORS.names(),
        "uni",
        "where and as what the forward runs: in this process, as transformers' own model, one request at a time, or "
        "nowhere (simulated): tokens of no meaning, in the time that executor.device would take",
        chapter="01",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "core",
        "engine.core",
        ("inproc", "process"),
        "inproc",
        "where the engine core steps: beside the front end, or in a process of its own, which nothing delays (V1; the "
        "server's default)",
        chapter="12",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "replicas",
        "engine.replicas",
        (1, 2),
        1,
        "engine cores side by side (data parallelism): each has the whole model, its own KV and its share of the "
        "machine; any number",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "router",
        "engine.router",
        ROUTERS.names(),
        "prefix",
        "which replica a request goes to: each in turn, where fewest sequences live, or where the longest beginning of "
        "its prompt is cached and the load allows it (SGLang's router)",
        workload="shared_prefix",
        metric="ttft_p50",
    ),
    Feature(
        "overlap",
        "engine.overlap",
        (1, 2),
        1,
        "steps in flight: a step's tokens are known before the next one is planned, or the next one is planned by "
        "counts while it runs (vLLM's asynchronous scheduling)",
        chapter="12",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "lora",
        "lora.enabled",
        (False, True),
        False,
        "LoRA adapters, several in one batch, loaded and unloaded at run time (PEFT's format)",
        workload="fixed",
        metric="throughput",
    ),
    Feature(
        "structured",
        "structured.backend",
        ("auto", *GRAMMARS.names()),
        "auto",
        "who holds an output to a JSON Schema, an expression or a grammar: a library, or the in-house automaton",
        chapter="16",
        workload="fixed",
        metric="host_ms",
    ),
    Feature(
        "preempt_every",
        "debug.preempt_every",
        (0, 3),
        0,
        "failure injection: preempt a running request every n-th step (0: never)",
        chapter="08",
    ),
    Feature(
        "evict_all",
        "debug.evict_all",
        (False, True),
        False,
        "failure injection: forget every reusable prefix block before each step",
        chapter="09",
    ),
)

# Options that no machine without a GPU can run, but for triton's interpreter: tests/kernels.
NEEDS_GPU: frozenset[tuple[str, Any]] = frozenset(
    (("kernels", "triton"), *(("attention", name) for name in ("triton", "flash", "flashinfer", "flash,triton")))
)

# What executor.kind=simulated can hold of an axis, where that is not all, and why no more.
_SIMULATED: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention": (("auto",), "has no K and V to attend over"),
    "kernels": (("auto",), "runs no kernels"),
    "dense_copy": ((True,), "keeps no weights, so no copy of them"),
    "huge_pages": ((True,), "keeps no weights that could move"),
    "activation_bits": (("auto",), "multiplies nothing that could be rounded"),
    "invariant": ((False,), "computes no numbers"),
    "forward": (("auto",), "has no forward to call in one way or another"),
    "compile": (("off",), "has no pieces to compile"),
    "graphs": (("none",), "has no launches: its steps cost what a device kept busy by captured forwards takes"),
    "lora": ((False,), "has no layers, and no cost yet for adapters"),
    "spec_decode": (("none", "ngram", "suffix"), "has no cost yet for guesses that a model makes"),
    "acceptance": (("match",), "has no distribution to reject by: guesses are right by a given chance"),
    "structured": (("auto",), "has no logits to mask"),
}

CONFLICTS: tuple[Conflict, ...] = (
    Conflict(("core", "inproc"), ("replicas", 2), "each replica is a process of its own"),
    *(
        Conflict(
            ("kv_dtype", kind), ("attention", attention), "it cannot read KV in 8 bits; cpu, triton, reference can"
        )
        for kind in KV_CODES
        for attention in ("sdpa", "flex", "flash", "flashinfer", *ATTENTION_PAIRS)
    ),
    *(
        Conflict(("kv_dtype", "float16"), ("attention", name), "it keeps KV as computed; cpu and reference round it")
        for name in (*ATTENTION.names(), *ATTENTION_PAIRS)
        if name not in ("cpu", "reference")
    ),
    Conflict(
        ("scheduler", "phased"),
        ("chunked_prefill", True),
        "V0's scheduler computes a prompt whole: a step is all prefill or all decode",
    ),
    Conflict(("scheduler", "static"), ("chunked_prefill", True), "static batching computes prompts whole"),
    *(
        Conflict(("forward", forward), ("compile", option), "only runner.forward=piecewise has pieces to compile")
        for forward in ("auto", "eager", "fused")
        for option in ("background", "wait")
    ),
    *(
        Conflict(("invariant", True), (axis, option), why)
        for axis, options, why in (
            ("attention", (*ATTENTION.names(), *ATTENTION_PAIRS), "only attention=cpu sums in one order"),
            ("compile", ("background", "wait"), "a compiler's loops may sum otherwise for another number of tokens"),
            ("lora", (True,), "an adapter's products with a prompt are a library's"),
            ("acceptance", ("rejection",), "which guesses are made, and how many, then changes what is drawn"),
        )
        for option in options
        if option != "cpu"
    ),
    *(
        Conflict(("quantization", "none"), ("activation_bits", bits), "only products with packed weights round inputs")
        for bits in (8, 16)
    ),
    *(
        Conflict(("forward", "fused"), ("graphs", graphs), "its C++ calls are for CPUs, which have no graphs")
        for graphs in GRAPHS.names()
        if graphs != "none"
    ),
    *(
        Conflict(("overlap", 2), ("preemption", option), "a failed step takes the next one along, with blocks it moved")
        for option in ("swap", "auto")
    ),
    Conflict(("scheduler", "static"), ("fork", "share"), "nobody enters a batch that runs, not even a fork"),
    Conflict(("scheduler", "static"), ("policy", "fair"), "nobody enters a batch that runs, and it waits for its last"),
    *(
        Conflict(("allocation", allocation), (axis, option), f"a contiguous run {why}")
        for allocation in ("max", "pow2", "oracle")
        for axis, option, why in (
            ("prefix", "hash", "belongs to one request: nothing in it can be shared"),
            ("prefix", "radix", "belongs to one request: nothing in it can be shared"),
            ("fork", "share", "belongs to one request: nothing in it can be shared"),
            ("preemption", "swap", "is given back whole: there are no blocks to move"),
            ("preemption", "auto", "is given back whole: there are no blocks to move"),
        )
    ),
    *(
        Conflict(("executor", "naive"), (axis, option), f"transformers {why}")
        for axis, options, keeps, why in (
            ("prefix", PREFIX_INDEXES.names(), "none", "keeps a cache for each request: no request finds another's"),
            ("kv_dtype", ("auto", "float16", *KV_CODES), "auto", "keeps K and V in the model's dtype"),
            ("quantization", ("none", "int8", "int4"), "none", "computes with all weights in the model's dtype"),
            ("dense_copy", (True, False), True, "has no packed weights beside which there could be a copy"),
            ("huge_pages", (True, False), True, "keeps its weights where it has loaded them"),
            ("activation_bits", ("auto", 8, 16), "auto", "multiplies no packed weights, whose inputs could be rounded"),
            ("invariant", (False, True), False, "computes a prompt and a token by other products"),
            ("fork", ("share", "lookup"), "lookup", "keeps a cache for each request: a fork has none to begin with"),
            ("preemption", PREEMPTIONS.names(), "recompute", "keeps no blocks that could be moved to the host"),
            ("attention", (*ATTENTION.names(), *ATTENTION_PAIRS), "auto", "attends by itself, over its own cache"),
            ("forward", FORWARDS.names(), "auto", "runs its model eagerly"),
            ("compile", ("off", "background", "wait"), "off", "runs its model eagerly"),
            ("graphs", GRAPHS.names(), "none", "runs its model eagerly"),
            ("lora", (False, True), False, "has its own layers, without adapters"),
            ("spec_decode", PROPOSERS.names(), "none", "is the baseline: its cache takes back no rejected draft"),
        )
        for option in options
        if option != keeps
    ),
    *(
        Conflict(("executor", "simulated"), (feature.name, option), f"it {_SIMULATED[feature.name][1]}")
        for feature in FEATURES
        if feature.name in _SIMULATED
        for option in feature.options
        if option not in _SIMULATED[feature.name][0]
    ),
)
