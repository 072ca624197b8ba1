"""PairsForward: an encoder that reads pairs of texts is told of each token which of the two it is of."""

from __future__ import annotations

from torch import Tensor

from minivllm.batch import InputBatch
from minivllm.runner.forward import EagerForward
from minivllm.upload import upload


class PairsForward(EagerForward):
    """A ForwardRunner for batches with token_types."""

    def __call__(self, batch: InputBatch) -> Tensor:
        columns = (batch.token_ids, batch.token_types, batch.positions)
        token_ids, token_types, positions = (upload(column, self.device) for column in columns)
        return self._forward(self.model.embed(token_ids, token_types=token_types), positions)
