# SPDX-License-Identifier: Apache-2.0
"""The block as a loop over experts in fp32 (or fp64), by autograd alone."""

import torch


def route(logits, K, *, renormalise=True, score="softmax", bias=None, scaling=1.0):
    scores = torch.softmax(logits, -1) if score == "softmax" else torch.sigmoid(logits)
    ids = torch.topk(scores if bias is None else scores + bias, K, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * scaling


def experts(x, ids, weights, w1, w2, b1=None, b2=None):
    out = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        for k in range(ids.shape[1]):
            rows = torch.where(ids[:, k] == e)[0]
            gate, up = (x[rows] @ w1[e].T + (0 if b1 is None else b1[e])).chunk(2, -1)
            y = (torch.nn.functional.silu(gate) * up) @ w2[e].T + (0 if b2 is None else b2[e])
            out = out.index_add(0, rows, weights[rows, k, None] * y)
    return out


def aux_loss(logits, ids, coefficient):
    T, E = logits.shape
    counts = torch.bincount(ids.flatten().long(), minlength=E).to(logits.dtype)
    return coefficient * E / (ids.shape[1] * T**2) * (torch.softmax(logits, -1).sum(0) * counts).sum()


def z_loss(logits, coefficient):
    return coefficient * torch.logsumexp(logits, -1).pow(2).mean()
