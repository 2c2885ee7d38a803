"""How many tokens each layer, or each head of a layer, keeps.

A budget is what is kept. Every allocator spends its `total` exactly, so that no comparison is won
by a larger cache, and settles ties the same way each time, the lowest index first. Sizes are Python
ints, one per layer, unless stated. Inputs may be on any device; the arithmetic is float64 and done
there, so that only sizes come to the host. Shape letters are those of `mmkv.scores`.

A policy that keeps something in every layer whatever its allocator says passes the result through
`fit(sizes, total, floor=..., max_size=...)`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Sizes closer than this to a whole number of tokens are that number, so that the noise of float
# arithmetic neither takes a token from a layer nor settles a tie.
_NOISE = 1e-6


def fit(sizes: Sequence[float], total: int, *, floor: int = 0, max_size: int) -> list[int]:
    """Make wished sizes whole and within bounds, with a sum of exactly `total`.

    Wishes are clipped to the bounds; what is then missing or over is shared equally among the
    layers that are not at a bound (the smallest change in the least-squares sense), and the largest
    fractions are rounded up. The order of the wishes is kept.

    Args:
        sizes: `[L]`, tokens wished per layer, whole or not.
        total: tokens to spend over all layers.
        floor: fewest tokens of a layer.
        max_size: most tokens of a layer.

    Returns:
        `[L]`, tokens per layer, between `floor` and `max_size`, of sum `total`.

    Raises:
        ValueError: the bounds leave no room for `total`, or a wish is NaN.
    """
    n_layers = len(sizes)
    if n_layers < 1:
        raise ValueError("at least one layer is needed, got none")
    if floor < 0:
        raise ValueError(f"floor must not be negative, got {floor}")
    if n_layers * floor > total:
        raise ValueError(
            f"a total of {total} tokens is below the {n_layers * floor} that must be kept "
            f"({n_layers} layers of {floor})"
        )
    if total > n_layers * max_size:
        raise ValueError(
            f"a total of {total} tokens is above the {n_layers * max_size} there are "
            f"({n_layers} layers of {max_size})"
        )
    if any(math.isnan(size) for size in sizes):
        raise ValueError(f"sizes must be numbers, got {list(sizes)}")
    if sum(sizes) == total and all(n == int(n) and floor <= n <= max_size for n in sizes):
        return [int(n) for n in sizes]
    wishes = [float(min(max(size, floor), max_size)) for size in sizes]

    def shifted(by: float) -> list[float]:
        return [min(max(wish + by, floor), max_size) for wish in wishes]

    low, high = float(floor - max_size), float(max_size - floor)
    for _ in range(100):  # far beyond float64's precision
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shifted(middle)) <= total else (low, middle)
    reals = shifted(low)
    whole = [math.floor(real + _NOISE) for real in reals]
    # Among equal fractions the larger wish, as clipping may have made different wishes equal.
    by_fraction = sorted(
        range(n_layers),
        key=lambda layer: (-round((reals[layer] - whole[layer]) / _NOISE), -sizes[layer]),
    )
    for layer in by_fraction[: total - sum(whole)]:
        whole[layer] += 1
    return whole


def uniform(n_layers: int, total: int, *, max_size: int) -> list[int]:
    """Give every layer the same number of tokens; the first layers take what is left over.

    Args:
        n_layers: number of layers.
        total: tokens to spend over all layers.
        max_size: most tokens of a layer.

    Returns:
        `[L]`, tokens per layer, of sum `total`.

    Raises:
        ValueError: `total` does not fit into the layers.

    Source: H2O, arXiv 2306.14048, and SnapKV, arXiv 2404.14469: one budget for all layers.
    """
    _check_layers(n_layers)
    return fit([total / n_layers] * n_layers, total, max_size=max_size)


def pyramid(n_layers: int, total: int, *, beta: float = 20, max_size: int) -> list[int]:
    """Let the sizes fall in equal steps from the first layer to the last.

    Args:
        n_layers: number of layers.
        total: tokens to spend over all layers, beyond the window that every layer keeps.
        beta: the last layer has the mean size divided by `beta`, unless the first layer would
            exceed `max_size`: then the first has `max_size`, and the last makes up for it.
        max_size: most tokens of a layer, without the window.

    Returns:
        `[L]`, tokens per layer, not increasing, of sum `total`.

    Raises:
        ValueError: `total` does not fit into the layers or `beta` is below 1.

    Source: PyramidKV, arXiv 2406.02069, section 4.2; see `mmkv.policies.pyramidkv` for its code.
    """
    _check_layers(n_layers)
    if not beta >= 1:
        raise ValueError(f"beta must be at least 1, got {beta}")
    mean = total / n_layers
    last = mean / beta
    first = 2 * mean - last
    if first > max_size:
        first, last = float(max_size), 2 * mean - max_size
    step = (first - last) / max(n_layers - 1, 1)
    if n_layers == 1:
        first = mean
    return fit([first - step * layer for layer in range(n_layers)], total, max_size=max_size)


def geometric(n_layers: int, total: int, *, decay: float = 0.95, max_size: int) -> list[int]:
    """Let the kept fraction shrink by the same factor from each layer to the next.

    Layers whose share exceeds `max_size` keep `max_size`, and the series starts after them.

    Args:
        n_layers: number of layers.
        total: tokens to spend over all layers.
        decay: size of a layer over that of the one before, in (0, 1]. By the default the last of
            32 layers keeps a fifth of what the first keeps.
        max_size: most tokens of a layer.

    Returns:
        `[L]`, tokens per layer, not increasing, of sum `total`.

    Raises:
        ValueError: `total` does not fit into the layers or `decay` is out of range.

    Source: PyramidInfer, arXiv 2405.12532, section 3; the paper lets the fraction decay with depth
    but spends no fixed total, so the series is scaled to spend it.
    """
    _check_layers(n_layers)
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be in (0, 1], got {decay}")
    for full in range(n_layers):
        series = [decay**layer for layer in range(n_layers - full)]
        first = (total - full * max_size) / sum(series)
        if first <= max_size:
            sizes = [float(max_size)] * full + [first * term for term in series]
            return fit(sizes, total, max_size=max_size)
    return fit([float(max_size)] * n_layers, total, max_size=max_size)


def squeeze(
    similarity: Tensor | Sequence[float], total: int, *, p: float = 0.35, max_size: int
) -> list[int]:
    """Cut the layers that change the residual stream least to `p` of the mean size.

    What that frees is shared equally by the other layers.

    Args:
        similarity: `[L]`, cosine similarity of the residual stream before and after each layer's
            attention block (`mmkv.scores.residual_similarity`, mean over rows).
        total: tokens to spend over all layers.
        p: size of a layer in the cluster of the highest similarity, as a fraction of the mean.
        max_size: most tokens of a layer.

    Returns:
        `[L]`, tokens per layer, of sum `total`; uniform if fewer than 3 similarities differ.

    Raises:
        ValueError: `total` does not fit into the layers, `p` is outside (0, 1], or a similarity is
            not finite.

    Source: SqueezeAttention, arXiv 2404.04793, algorithm 1: k-means with 3 clusters.
    """
    values = torch.as_tensor(similarity).detach().to("cpu").double()
    if values.ndim != 1 or not len(values):
        raise ValueError(f"similarity must be [L], got {tuple(values.shape)}")
    if not bool(values.isfinite().all()):
        raise ValueError(f"similarity must be finite, got {values.tolist()}")
    if not 0 < p <= 1:
        raise ValueError(f"p must be in (0, 1], got {p}")
    n_layers = len(values)
    if len(values.unique()) < 3:
        return uniform(n_layers, total, max_size=max_size)

    from sklearn.cluster import KMeans  # here, because it takes a second to import

    # n_init by name: scikit-learn's annotations infer a str from the default.
    clusters = KMeans(n_clusters=3, random_state=0).set_params(n_init=10)
    labels = torch.as_tensor(clusters.fit_predict(values[:, None].numpy()))
    # k-means in one dimension makes intervals: the highest mean is where the highest value is.
    cut = labels == labels[values.argmax()]
    n_cut = int(cut.sum())
    mean = total / n_layers
    rest = (total - n_cut * p * mean) / max(n_layers - n_cut, 1)
    return fit([p * mean if c else rest for c in cut.tolist()], total, max_size=max_size)


def prefix(importance: Tensor, total: int) -> list[int]:
    """Give each layer the tokens that make the lowest retention over layers as high as it can be.

    With `P_l(o)` the share of layer `l`'s importance in its `o` largest entries, the paper
    bisects for one `p` and keeps `min{o : P_l(o) >= p}` tokens, which is the number of `o` with
    `P_l(o) < p`. So the `total` smallest of all `P_l(o)` are the answer, with the tokens that no
    `p` can place already at the layers of the lowest retention, and one sort finds them exactly.

    Args:
        importance: `[L, N]`, not negative; normalised per layer here. NaN counts as 0, inf as the
            largest finite entry of the layer, and a layer of zeros as uniform.
        total: tokens to spend over all layers.

    Returns:
        `[L]`, tokens per layer, at most `N`, of sum `total`.

    Raises:
        ValueError: the shape does not fit, an entry is negative, or `total` is outside [0, L * N].

    Source: PrefixKV, arXiv 2412.03409, section 3.3; its search may miss the sum, this one does not.
    """
    _check_total(total, importance)
    return prefix_rows(importance[None], torch.tensor([total]))[0]


def prefix_rows(
    importance: Tensor, total: Tensor, offered: Tensor | None = None
) -> list[list[int]]:
    """`prefix` of B rows at once, and one transfer to the host.

    Args:
        importance: `[B, L, N]`.
        total: int64 `[B]`, at most `L * N`, or L times what is offered.
        offered: int64 `[B]`, how many of the N are there, the others being filler; None: all.

    Returns:
        `[B][L]`.

    Raises:
        ValueError: an entry is negative.
    """
    shares, filler = _shares(importance, offered)
    reached = _retention_curve(shares)[..., :-1]  # [B, L, N]: P_l before the next token is added
    # Token-major, so that equal entries (the zeros of a tail) go round the layers.
    order = reached.masked_fill(filler, torch.inf).mT.flatten(1).argsort(dim=-1, stable=True)
    return _counted(order, total, importance)


def pooled(
    importance: Tensor, total: int | None = None, retention: float | None = None
) -> list[int]:
    """Give each layer the tokens that make the mean retention over layers as high as it can be.

    The paper's greedy loop adds one token at a time where it adds most. As retention is concave in
    the size, that is the `total` largest of all layers' normalised entries: one sort, no loop.

    Args:
        importance: `[L, N]`, not negative; normalised per layer here. NaN counts as 0, inf as the
            largest finite entry of the layer, and a layer of zeros as uniform.
        total: tokens to spend over all layers.
        retention: or the mean retention to reach with as few tokens as possible, in (0, 1].

    Returns:
        `[L]`, tokens per layer, at most `N`, of sum `total` if that was given.

    Raises:
        ValueError: not exactly one of `total` and `retention` is given or it is out of range, the
            shape does not fit, or an entry is negative.

    Source: XKV, arXiv 2412.05896, algorithm 1.
    """
    if (total is None) == (retention is None):
        raise ValueError(
            f"exactly one of total and retention must be given, got {total} and {retention}"
        )
    _check_total(0 if total is None else total, importance)
    given = None if total is None else torch.tensor([total])
    return pooled_rows(importance[None], given, retention=retention)[0]


def pooled_rows(
    importance: Tensor,
    total: Tensor | None,
    offered: Tensor | None = None,
    *,
    retention: float | None = None,
) -> list[list[int]]:
    """`pooled` of B rows at once; arguments and result as of `prefix_rows`.

    With both `total` and `retention`, whichever gives a row more tokens.
    """
    shares, filler = _shares(importance, offered)
    # Token-major, so that equal entries go round the layers.
    entries = shares.masked_fill(filler, -1.0).mT.flatten(1)
    entries, order = entries.sort(dim=-1, descending=True, stable=True)
    if retention is not None:
        if not 0 < retention <= 1:
            raise ValueError(f"retention must be in (0, 1], got {retention}")
        mean = entries.clamp(min=0).cumsum(-1)
        mean = mean / mean[:, -1:]
        # Less a rounding error, or ten entries of 0.1 would not reach 0.8 with eight of them.
        reached = (mean < retention * (1 - 1e-12)).sum(-1) + 1
        total = reached if total is None else torch.maximum(reached, total)
    assert total is not None  # one of the two was
    return _counted(order, total, importance)


def retention(importance: Tensor, sizes: Sequence[int]) -> list[float]:
    """Share of each layer's importance in its `sizes[l]` largest entries.

    Args:
        importance: `[L, N]`, as for `prefix` and `pooled`.
        sizes: `[L]`, tokens kept per layer.

    Returns:
        `[L]`, in [0, 1].

    Raises:
        ValueError: the shapes do not fit, an entry is negative, or a size is outside [0, N].

    Source: XKV, arXiv 2412.05896, section III; `P_l` of PrefixKV, arXiv 2412.03409.
    """
    _check_total(0, importance)
    n_layers, n = importance.shape
    if len(sizes) != n_layers or not all(0 <= size <= n for size in sizes):
        raise ValueError(f"sizes must be {n_layers} numbers in [0, {n}], got {list(sizes)}")
    _check_lowest(float(_lowest(importance)))
    curve = _retention_curve(_shares(importance)[0])
    return curve.cpu().gather(1, torch.tensor(list(sizes))[:, None])[:, 0].tolist()


@torch.no_grad()
def adaptive_heads(scores: Tensor, per_head: int | Tensor, *, alpha: float = 0.5) -> Tensor:
    """Split a layer's tokens among its heads by where the largest scores are.

    Args:
        scores: `[B, H, N]`, higher = keep. NaN counts as 0.
        per_head: tokens per head on average, at most `N`; or int64 `[B]`, those of each row.
        alpha: share of the budget that is spread evenly, in [0, 1]: 1 is uniform, 0 follows the
            scores alone and retains the highest sum of scores of all splits.

    Returns:
        LongTensor `[B, H]`, in [0, N]; each row sums to `H * per_head`.

    Raises:
        ValueError: the shape does not fit, `per_head` is outside [0, N] or `alpha` outside [0, 1].

    Source: Ada-KV, arXiv 2407.11550, algorithm 2.
    """
    if scores.ndim != 3 or not scores.is_floating_point():
        raise ValueError(
            f"scores must be a floating-point [B, H, N], got {scores.dtype} {tuple(scores.shape)}"
        )
    B, H, N = scores.shape
    if isinstance(per_head, int) and not 0 <= per_head <= N:
        raise ValueError(f"per_head must be between 0 and the {N} tokens there are, got {per_head}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    mean = torch.as_tensor(per_head, device=scores.device).expand(B)[:, None]
    # Token-major and stable, so that equal scores go round the heads.
    flat = scores.nan_to_num(nan=0.0).mT.reshape(B, N * H)
    order = flat.argsort(dim=-1, descending=True, stable=True)
    adaptive = _first(order, H * mean, H)

    reals = (1 - alpha) * adaptive.double() + alpha * mean
    whole = (reals + _NOISE).floor()
    missing = H * mean - whole.sum(-1, keepdim=True)
    fraction = ((reals - whole) / _NOISE).round()
    rank = fraction.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (whole + (rank < missing)).long()


def _check_layers(n_layers: int) -> None:
    if n_layers < 1:
        raise ValueError(f"at least one layer is needed, got {n_layers}")


def _check_total(total: int, importance: Tensor) -> None:
    if importance.ndim != 2 or not importance.numel():
        raise ValueError(f"importance must be [L, N], got {tuple(importance.shape)}")
    if not 0 <= total <= importance.numel():
        raise ValueError(
            f"a total of {total} tokens is not between 0 and the {importance.numel()} there are "
            f"({len(importance)} layers of {importance.shape[1]})"
        )


def _lowest(importance: Tensor) -> Tensor:
    return importance.nan_to_num(nan=0.0).amin()


def _check_lowest(lowest: float) -> None:
    if lowest < 0:
        raise ValueError(f"importance must not be negative, got {lowest}")


def _shares(importance: Tensor, offered: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Importance `[..., L, N]` with each layer normalised to sum 1, float64; 0 for filler.

    Also which of the N are filler, bool `[..., 1, N]`: all from `offered` `[...]` on.
    """
    N, device = importance.shape[-1], importance.device
    here = torch.arange(N, device=device)
    most = torch.tensor(N) if offered is None else offered
    filler = here >= most.to(device)[..., None, None]
    weights = importance.detach().double().nan_to_num(nan=0.0, posinf=torch.inf)
    infinite = weights.isinf()
    largest = weights.masked_fill(infinite, 0.0).amax(-1, keepdim=True)
    # A layer of nothing but inf and zeros has no finite scale: any positive number serves.
    largest = torch.where(largest > 0, largest, 1.0)
    # By the largest first: the sum of very large or very small entries is not finite or not exact.
    weights = torch.where(infinite, 1.0, weights / largest)
    weights = torch.where(weights.amax(-1, keepdim=True) > 0, weights, 1.0)
    weights = weights.masked_fill(filler, 0.0)
    return weights / weights.sum(-1, keepdim=True), filler


def _retention_curve(shares: Tensor) -> Tensor:
    """`P_l(o)` for `o = 0..N`: `[..., L, N + 1]`, not decreasing, from exactly 0 to exactly 1."""
    curve = shares.sort(dim=-1, descending=True).values.cumsum(-1)
    return torch.nn.functional.pad(curve / curve[..., -1:], (1, 0))


def _first(order: Tensor, total: Tensor, n: int) -> Tensor:
    """How often each of `n` occurs among the first `total` `[B, 1]` of indices modulo n: `[B, n]`.

    `order` is int64 `[B, ...]`.
    """
    taken = torch.arange(order.shape[-1], device=order.device) < total
    return order.new_zeros(len(order), n).scatter_add_(1, order % n, taken.long())


def _counted(order: Tensor, total: Tensor, importance: Tensor) -> list[list[int]]:
    """Occurrences of each layer among the first `total` `[B]` of token-major indices: `[B][L]`.

    Raises:
        ValueError: an entry of the importance `[B, L, N]` is negative.
    """
    B, L, _ = importance.shape
    found = _first(order, total.to(order.device)[:, None], L)
    told = torch.cat([found.flatten().double(), _lowest(importance).double()[None]])
    *flat, lowest = told.tolist()
    _check_lowest(lowest)
    return [[int(n) for n in flat[b * L : (b + 1) * L]] for b in range(B)]
