"""How fast are many texts embedded, beside transformers as sentence-transformers drives it?

Both sides get the same tokens. The other side sorts the texts by length and pads batches of 32, which is what
SentenceTransformer.encode does; mean pooling and unit length on both sides, in float32 on equal threads, in turns. The
vectors are compared too.

    python -m bench embed --out
"""

from __future__ import annotations

import random
import time

import numpy as np
import torch
from common import emit, note, parser, spread
from transformers import AutoModel

from minivllm import LLM
from minivllm.loading import resolve

BATCH = 32


class Transformers:
    def __init__(self, folder):
        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()

    @torch.inference_mode()
    def embed(self, texts: list[list[int]]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = [self._batch([texts[i] for i in order[at : at + BATCH]]) for at in range(0, len(order), BATCH)]
        back = np.empty((len(texts), self.model.config.hidden_size), np.float32)
        back[order] = np.concatenate(found)
        return back

    def _batch(self, texts: list[list[int]]) -> np.ndarray:
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        hidden = self.model(ids, attention_mask=mask).last_hidden_state
        mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1).numpy()


class Minivllm:
    def __init__(self, model: str, threads: int):
        self.llm = LLM(model, overrides={"executor.num_threads": threads})

    def embed(self, texts: list[list[int]]) -> np.ndarray:
        return np.array([output.outputs.embedding for output in self.llm.embed(texts, use_tqdm=False)], np.float32)


def main() -> None:
    args = parser(__doc__, "embed")
    args.add_argument("--model", default="minilm", help="of BERT's kind, pooled by the mean")
    args.add_argument("--num-texts", type=int, default=256)
    args.add_argument("--longest", type=int, nargs="+", default=[16, 64, 256], help="texts of 3 to so many tokens")
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--threads", type=int, default=1)
    args = args.parse_args()
    sides = {"minivllm": Minivllm(args.model, args.threads)}
    torch.set_num_threads(args.threads)
    sides["transformers"] = Transformers(resolve(args.model).tokenizer_dir)
    results = []
    for longest in args.longest:
        rng = random.Random(longest)
        vocab = range(1000, sides["transformers"].model.config.vocab_size)
        texts = [rng.choices(vocab, k=rng.randint(3, longest)) for _ in range(args.num_texts)]
        results.append(compare(sides, texts, args.rounds) | {"longest": longest})
        note(f"3 to {longest} tokens: {results[-1]['ratio']}")
    emit("embed", vars(args), results, args.out)


def compare(sides: dict[str, Minivllm | Transformers], texts: list[list[int]], rounds: int) -> dict:
    num_tokens, seconds = sum(map(len, texts)), {name: [] for name in sides}
    found = {name: side.embed(texts) for name, side in sides.items()}  # warm
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            begin = time.perf_counter()
            sides[name].embed(texts)
            seconds[name].append(time.perf_counter() - begin)
    pairs = zip(seconds["transformers"], seconds["minivllm"], strict=True)
    return {
        "tokens_per_second": {name: spread([num_tokens / s for s in values], 0) for name, values in seconds.items()},
        "ratio": spread([theirs / ours for theirs, ours in pairs]),
        "largest_difference": float(np.abs(found["minivllm"] - found["transformers"]).max()),
    }


if __name__ == "__main__":
    main()
