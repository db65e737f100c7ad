"""The plan against a token-by-token twin, and its counts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchtrain.data.packing import PackPlan, Span
from torchtrain.data.streams import TAIL, random_stream


def spans_of(plan: PackPlan) -> list[list[Span]]:
    return [plan.spans(row) for row in range(len(plan))]


def fill_token_by_token(order, lengths, overhead, capacity):
    """The twin: rows of spans, one token laid down at a time."""
    rows, row, room = [], [], capacity
    for document in order:
        for token in range(lengths[document]):
            goes_on = row and row[-1][0] == document
            if room < (1 if goes_on else overhead[document] + 1):
                rows.append(row)
                row, room, goes_on = [], capacity, False
            if goes_on:
                row[-1][2] += 1
                room -= 1
            else:
                row.append([document, token, token + 1])
                room -= overhead[document] + 1
    rows.append(row)
    return [[Span(*span) for span in row] for row in rows], room


documents = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=30)


@given(documents, st.integers(5, 20), st.integers(0, 3), st.integers(0, 2), st.sampled_from(["pad", "drop"]))
def test_plan_is_the_greedy_filling_and_its_counts_add_up(documents, capacity, seed, epoch, last):
    lengths, overhead = np.array(documents).T
    plan = PackPlan(lengths, capacity, overhead, seed, epoch, last)
    whole = PackPlan(lengths, capacity, overhead, seed, epoch)
    order = list(dict.fromkeys(span.document_index for row in spans_of(whole) for span in row))
    expected, room = fill_token_by_token(order, lengths, overhead, capacity)
    if last == "drop" and room:
        expected.pop()
    rows = spans_of(plan)
    assert rows == expected

    kept = sum(span.stop - span.start for row in rows for span in row)
    spent = sum(overhead[span.document_index] for row in rows for span in row)
    assert plan.tokens == kept
    assert plan.tokens + plan.dropped_tokens == lengths.sum()
    assert plan.overhead_tokens == spent
    assert plan.padding_tokens == len(rows) * capacity - kept - spent
    assert last == "drop" or plan.dropped_tokens == 0


def fill_best(sizes, capacity):
    """The twin of best fit decreasing: look at every row; of two with as little room the one filled last."""
    rows: list[list[int]] = []  # of each: its room, and when it was filled
    row_of = {}
    for time, piece in enumerate(sorted(range(len(sizes)), key=lambda i: -sizes[i])):
        fits = [number for number, (room, _) in enumerate(rows) if room >= sizes[piece]]
        if fits:
            number = min(fits, key=lambda i: (rows[i][0], -rows[i][1]))
        else:
            number = len(rows)
            rows.append([capacity, time])
        rows[number] = [rows[number][0] - sizes[piece], time]
        row_of[piece] = number
    return row_of


@given(documents, st.integers(5, 20), st.integers(0, 3), st.integers(0, 2))
def test_best_fit_is_that_of_the_twin_and_cuts_only_what_is_longer_than_a_row(documents, capacity, seed, epoch):
    lengths, overhead = np.array(documents).T
    plan = PackPlan(lengths, capacity, overhead, seed, epoch, strategy="best_fit")
    rows = spans_of(plan)
    order = random_stream(seed, 0, epoch).permutation(len(lengths)).tolist()
    pieces = [
        Span(document, start, min(start + capacity - overhead[document], lengths[document]))
        for document in order
        for start in range(0, lengths[document], capacity - overhead[document])
    ]
    row_of = fill_best([stop - start + overhead[document] for document, start, stop in pieces], capacity)
    expected = [[] for _ in range(max(row_of.values()) + 1)]
    for piece, span in enumerate(pieces):
        expected[row_of[piece]].append(span)
    assert sorted(rows) == sorted(expected)
    assert plan.tokens == lengths.sum()
    assert plan.dropped_tokens == 0
    assert plan.cuts == sum(
        -(-length // (capacity - spent)) - 1 for length, spent in zip(lengths, overhead, strict=True)
    )
    assert plan.padding_tokens == len(rows) * capacity - plan.tokens - plan.overhead_tokens >= 0


@given(
    documents,
    st.integers(5, 20),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 9),
    st.sampled_from(["pad", "drop"]),
)
def test_by_length_lays_documents_end_to_end_by_length_and_shuffles_groups(
    documents, capacity, seed, together, before, last
):
    lengths, overhead = np.array(documents).T
    plan = PackPlan(lengths, capacity, overhead, seed, 0, last, "by_length", together, before)
    order = sorted(random_stream(seed, 0, 0).permutation(len(lengths)).tolist(), key=lambda i: lengths[i])
    if last == "drop":  # from the document on of a token that is drawn, and after the longest the shortest
        drawn = random_stream(seed, TAIL, 0).integers(lengths.sum())
        begins = next(i for i in range(len(order)) if lengths[order[: i + 1]].sum() > drawn)
        order = order[begins:] + order[:begins]
    expected, room = fill_token_by_token(order, lengths, overhead, capacity)
    if last == "drop" and room:
        expected.pop()
    expected.sort(key=lambda row: sum((span.stop - span.start) ** 2 for span in row))
    rows, open_places = spans_of(plan), -before % together
    begins = max(0, len(expected) - open_places)
    assert rows[:open_places] == expected[begins:], "the step that the epoch before left open"
    rows, expected = rows[open_places:], expected[:begins]
    whole = len(expected) // together * together
    groups = [expected[i : i + together] for i in range(0, whole, together)]
    found = [rows[i : i + together] for i in range(0, whole, together)]
    assert sorted(found) == sorted(groups), "a step's rows have as many pairs, in whichever order steps come"
    assert rows[whole:] == expected[whole:]


def test_whatever_the_strategy_epochs_and_seeds_have_orders_of_their_own():
    lengths, none = np.arange(1, 200), np.zeros(199, dtype=int)
    for strategy in ("sequential", "best_fit", "by_length"):
        drawn = ((0, 0), (0, 0), (0, 1), (1, 0))
        plans = [spans_of(PackPlan(lengths, 250, none, *numbers, strategy=strategy)) for numbers in drawn]
        assert plans[0] == plans[1]
        assert plans[0] not in (plans[2], plans[3])
