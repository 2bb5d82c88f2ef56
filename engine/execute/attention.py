"""Paged attention over ragged batches, in plain torch: the reference for faster kernels, and what a CPU runs.

A batch is a list of spans: one request's queries, which are the last tokens of its context. A plan is made once per
pass and serves every layer. Spans of similar size share one padded call; padding reads the span's own first token,
never memory that belongs to nobody, and is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cache.storage import KVStorage

BACKEND = "torch"
"""Part of the fingerprint: another backend rounds differently."""

SPLIT_ELEMENTS = 1 << 20
"""A group is split where that saves this many padded elements (query x context x width of a row): below, a further
call costs more."""

Rows = npt.NDArray[np.int64]


class Span(NamedTuple):
    """rows: the storage rows (layer 0) of the context, in token order. queries: how many of its last tokens ask."""

    rows: Rows
    queries: int


@dataclass(frozen=True)
class Group:
    """Spans in one padded call.

    width: queries per span, padding included. query_index: [spans * width] batch rows; None: the batch as it is.
    rows: [spans, context]. mask: None, or [spans, 1, width, context].
    """

    width: int
    query_index: Tensor | None
    rows: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """groups: all spans. restore: for each batch row its place in the groups' joined output; None: the same place."""

    groups: list[Group]
    restore: Tensor | None


def plan_attention(spans: Sequence[Span], device: torch.device, row_width: int = 1) -> AttentionPlan:
    """Group and pad the spans; the batch's rows are their queries, in order. At least one span.

    row_width: elements of a storage row, which say what padding costs.
    """
    queries = np.array([span.queries for span in spans])
    contexts = np.array([len(span.rows) for span in spans])
    firsts = np.cumsum(queries) - queries
    members = _group(queries, contexts, max(1, SPLIT_ELEMENTS // row_width))
    if len(members) == 1 and len(firsts) == int(firsts[-1]) + int(queries[-1]):
        return AttentionPlan([_decode_group(spans, contexts, device)], None)
    groups, places, offset = [], np.empty(int(queries.sum()), np.int64), 0
    for chosen in members:
        width, length = int(queries[chosen].max()), int(contexts[chosen].max())
        for line, member in enumerate(chosen):
            start, count = firsts[member], queries[member]
            places[start : start + count] = offset + line * width + np.arange(count)
        steps = np.minimum(np.arange(width), queries[chosen][:, None] - 1)  # padded queries repeat the last one
        mask = None
        if width > 1 or bool((contexts[chosen] < length).any()):
            positions = torch.from_numpy((contexts - queries)[chosen][:, None] + steps).to(device)
            mask = torch.arange(length, device=device) <= positions[:, None, :, None]
        index = torch.from_numpy((firsts[chosen][:, None] + steps).reshape(-1)).to(device)
        groups.append(Group(width, index, _padded([spans[member] for member in chosen], length, device), mask))
        offset += len(chosen) * width
    return AttentionPlan(groups, torch.from_numpy(places).to(device))


def _decode_group(spans: Sequence[Span], contexts: npt.NDArray[np.int64], device: torch.device) -> Group:
    """One query per span, in the batch's own order: what every recurrent batch is, so it is kept quick."""
    length = int(contexts.max())
    mask = None
    if int(contexts.min()) < length:
        mask = (torch.arange(length, device=device) < torch.from_numpy(contexts).to(device)[:, None])[:, None, None]
    return Group(1, None, _padded(spans, length, device), mask)


def _padded(spans: Sequence[Span], length: int, device: torch.device) -> Tensor:
    """The context rows of the spans, [spans, length]; what is missing repeats the span's own first row."""
    rows = np.empty((len(spans), length), np.int64)
    for line, span in enumerate(spans):
        count = len(span.rows)
        rows[line, :count] = span.rows
        if count < length:
            rows[line, count:] = span.rows[0]
    return torch.from_numpy(rows).to(device)


def _group(queries: npt.NDArray[np.int64], contexts: npt.NDArray[np.int64], least: int) -> list[npt.NDArray[np.int64]]:
    """Split the spans, ordered by size, wherever that saves at least `least` padded scores (query x context)."""
    whole = np.arange(len(queries))
    if len(whole) * int(queries.max()) * int(contexts.max()) - int((queries * contexts).sum()) < least:
        return [whole]  # padding is cheap: keep the batch's own order
    order = np.lexsort((contexts, queries))
    groups, current, width, length = [], [int(order[0])], int(queries[order[0]]), int(contexts[order[0]])
    for member in map(int, order[1:]):
        wider, longer = max(width, int(queries[member])), max(length, int(contexts[member]))
        joined = (len(current) + 1) * wider * longer
        apart = len(current) * width * length + int(queries[member] * contexts[member])
        if joined - apart >= least:
            groups.append(np.array(current))
            current, width, length = [member], int(queries[member]), int(contexts[member])
        else:
            current.append(member)
            width, length = wider, longer
    return [*groups, np.array(current)]


def attend(plan: AttentionPlan, storage: KVStorage, layer: int, query: Tensor) -> Tensor:
    """Causal attention of every query over its own context, which must be written in this layer.

    query: [rows, heads, head_dim]. Returns the same shape. Softmax in float32; scale head_dim ** -0.5.
    """
    outputs = []
    for group in plan.groups:
        key, value = storage.read(layer, group.rows)
        spans, width = group.rows.shape[0], group.width
        asked = query if group.query_index is None else query.index_select(0, group.query_index)
        output = F.scaled_dot_product_attention(
            asked.view(spans, width, *query.shape[1:]).transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=group.mask,
            enable_gqa=query.shape[1] != storage.kv_heads,
        )
        outputs.append(output.transpose(1, 2).reshape(spans * width, *query.shape[1:]))
    if plan.restore is None:
        return outputs[0]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).index_select(0, plan.restore)
