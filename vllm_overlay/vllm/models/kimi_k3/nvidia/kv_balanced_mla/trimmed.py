# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Batches whose query lengths only the device knows (adaptive verification).

The kernel takes one query length for the whole batch. A request with fewer tokens
gets that length too: its tokens go to the *end* of its block of rows and the rows
before them hold whatever, because the causal bound counts from the request's last
token. With ``Q`` rows a request, ``n <= Q`` tokens and KV length ``L``, token ``j``
lies in row ``Q - n + j`` and sees the positions

    < L - Q + 1 + (Q - n + j)  =  L - n + 1 + j

which is its own bound, under decode context parallelism as well. The rows before
``Q - n`` are computed and never read. KV is read once a request, as ever.
"""

from dataclasses import dataclass

import torch


@dataclass
class TrimmedRows:
    """Where the tokens of a trimmed batch lie among the kernel's rows.

    Attributes:
        token_of_row: ``[max_rows]`` int64, the token that each row holds.
        row_of_token: ``[max_rows]`` int64, the row that holds each token.
        is_padding: ``[max_rows]`` bool, tokens that belong to no request.

    """

    token_of_row: torch.Tensor
    row_of_token: torch.Tensor
    is_padding: torch.Tensor

    def fill(self, query_start_loc: torch.Tensor, qlen: int, tokens: int) -> None:
        """Compute the maps on the device, without a synchronisation.

        Args:
            query_start_loc: ``[requests + 1]`` int32. Requests have 0 to ``qlen``
                tokens; a graph's padding has none.
            qlen: Rows of a request.
            tokens: Tokens of the batch with a graph's padding, which comes last.

        """
        starts, ends = query_start_loc[:-1], query_start_loc[1:]
        requests = starts.shape[0]
        row = torch.arange(qlen, device=starts.device)
        token_of_row = ends[:, None] - qlen + row
        # Rows without a token read some token's query: it need only exist.
        torch.clamp(
            token_of_row.flatten(),
            0,
            tokens - 1,
            out=self.token_of_row[: requests * qlen],
        )
        token = torch.arange(tokens, dtype=ends.dtype, device=ends.device)
        request = torch.searchsorted(ends, token, right=True)
        torch.eq(request, requests, out=self.is_padding[:tokens])
        request.clamp_(max=requests - 1)
        row_of_token = (request + 1) * qlen - ends[request] + token
        torch.clamp(
            row_of_token, 0, requests * qlen - 1, out=self.row_of_token[:tokens]
        )

    def spread(
        self, q: torch.Tensor, requests: int, qlen: int, out: torch.Tensor
    ) -> torch.Tensor:
        """Copy a packed query to the kernel's rows.

        Args:
            q: ``[tokens, heads, 576]`` FP8.
            requests: Requests of the batch.
            qlen: Rows of a request.
            out: At least ``requests * qlen * heads * 576`` bytes, uint8.

        Returns:
            ``[requests * qlen, heads, 576]`` FP8, a view of ``out``.

        """
        rows = requests * qlen
        flat = q.view(torch.uint8).flatten(1)
        spread = out[: rows * flat.shape[1]].view(rows, flat.shape[1])
        torch.index_select(flat, 0, self.token_of_row[:rows], out=spread)
        return spread.view(q.dtype).view(rows, *q.shape[1:])

    def pack(self, values: torch.Tensor, tokens: int, padding: float) -> torch.Tensor:
        """Take the tokens' rows back.

        Args:
            values: ``[requests * qlen, heads, ...]``.
            tokens: Tokens of the batch with a graph's padding.
            padding: What tokens of no request get.

        Returns:
            ``[tokens, heads, ...]``.

        """
        packed = values.index_select(0, self.row_of_token[:tokens])
        dead = self.is_padding[:tokens].view(-1, *[1] * (values.dim() - 1))
        return packed.masked_fill_(dead, padding)
