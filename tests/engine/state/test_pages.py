"""The page pool: the holders of pages, their names, and the order of eviction."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidemill.engine.state.pages import PagePool, page_digests, root_digest


def digests(*texts: bytes) -> list[bytes]:
    """Return the names of consecutive pages of two tokens, one byte of a text each."""
    tokens = np.frombuffer(b"".join(texts), np.uint8).astype(np.int32)
    return page_digests(root_digest(""), tokens, 2)


def test_a_page_is_named_by_all_tokens_up_to_its_end() -> None:
    """The same tokens after another prefix are another page."""
    assert digests(b"ab", b"cd") == digests(b"ab", b"cd")
    assert digests(b"ab", b"cd")[1] != digests(b"xb", b"cd")[1]
    assert digests(b"ab", b"ab")[0] != digests(b"ab", b"ab")[1]


def test_a_view_of_a_table_is_named_like_its_copy() -> None:
    """The scheduler names slices of its token table and its own arrays alike."""
    table = np.arange(40, dtype=np.int32).reshape(4, 10)
    for view in (table[2, 3:7], table[:, 2]):
        names = page_digests(root_digest(""), view, 2)
        assert names == page_digests(root_digest(""), view.copy(), 2)
        assert len(names) == 2


def test_pages_are_named_one_by_one_or_all_at_once() -> None:
    """A sequence is named as it grows; one with the same prefix is named from its prompt."""
    first, second, third = digests(b"ab", b"cd", b"ef")
    rest = np.frombuffer(b"cdef", np.uint8).astype(np.int32)
    assert page_digests(first, rest, 2) == [second, third]


def test_a_page_is_free_only_when_its_last_holder_is_gone() -> None:
    """Two holders of a shared page release it in turn."""
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.register([page], [b"a"])
    pool.share([page])
    assert (pool.num_free, pool.num_unheld([page])) == (1, 0)
    pool.release([page])
    assert pool.num_free == 1
    pool.release([page])
    assert (pool.num_free, pool.num_unheld([page])) == (2, 1)


def test_a_released_page_can_be_found_and_held_again() -> None:
    """Its contents remain after its holders are gone; sharing takes it off the free list."""
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.register([page], [b"a"])
    pool.release([page])
    assert pool.lookup([b"a"]) == [page]
    pool.share([page])
    assert pool.num_free == 1
    assert pool.allocate(1) != [page]


def test_lookup_returns_the_longest_known_run_from_the_start() -> None:
    """A known page after an unknown one cannot be used."""
    pool = PagePool(4)
    first, second, third = pool.allocate(3)
    pool.register([first], [b"a"])
    pool.register([second], [b"b"])
    pool.register([third], [b"c"])
    assert pool.lookup([b"a", b"b", b"c"]) == [first, second, third]
    assert pool.lookup([b"a", b"x", b"c"]) == [first]
    assert pool.lookup([b"x", b"b"]) == []
    assert pool.lookup([]) == []


def test_pages_without_a_name_are_reused_before_those_with_one() -> None:
    """Their contents can never be looked up."""
    pool = PagePool(3)
    named, unnamed, other = pool.allocate(3)
    pool.register([named], [b"a"])
    pool.register([other], [b"b"])
    pool.release([named])
    pool.release([other])
    pool.release([unnamed])
    assert pool.allocate(3) == [unnamed, named, other]


def test_named_pages_are_reused_least_recently_released_first() -> None:
    """The last page of a sequence is reused first, because its prefix is worth most."""
    pool = PagePool(4)
    old = pool.allocate(2)
    new = pool.allocate(2)
    for page, name in zip([*old, *new], (b"a", b"b", b"c", b"d"), strict=True):
        pool.register([page], [name])
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.lookup([b"a", b"b"]) == [old[0]]
    assert pool.allocate(3) == [old[0], new[1], new[0]]


def test_use_makes_a_page_recent_again() -> None:
    """A page that was shared in the meantime outlives one that was not."""
    pool = PagePool(2)
    first, second = pool.allocate(2)
    pool.register([first], [b"a"])
    pool.register([second], [b"b"])
    pool.release([first])
    pool.release([second])
    pool.share([first])
    pool.release([first])
    assert pool.allocate(2) == [second, first]


def test_the_first_page_of_a_name_keeps_it() -> None:
    """If two sequences compute the same page concurrently, only one copy is named."""
    pool = PagePool(3)
    first, second = pool.allocate(2)
    pool.register([first], [b"a"])
    pool.register([second], [b"a"])
    pool.release([second])
    assert pool.lookup([b"a"]) == [first]
    assert pool.allocate(2) == [second, 2]
    assert pool.lookup([b"a"]) == [first]


def test_allocating_removes_the_names_of_a_page() -> None:
    """The page's tokens are about to be overwritten."""
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    pool.register([page], [b"a"])
    pool.release([page])
    assert pool.allocate(1) == [page]
    assert pool.lookup([b"a"]) == []


def test_invalidating_everything_does_not_change_the_holders() -> None:
    """After a failed step no page can be found, but every sequence still holds its pages."""
    pool = PagePool(3)
    held, freed = pool.allocate(2)
    pool.register([held], [b"a"])
    pool.register([freed], [b"b"])
    pool.release([freed])
    pool.invalidate_all()
    assert pool.lookup([b"a"]) == pool.lookup([b"b"]) == []
    assert pool.num_free == 2
    assert held not in pool.allocate(2)
    pool.register([held], [b"a"])
    assert pool.lookup([b"a"]) == [held]


def chain(pool: PagePool, names: list[bytes], parent: bytes | None = None) -> list[int]:
    """Allocate pages that follow one another, and name them."""
    pages = pool.allocate(len(names))
    pool.register(pages, names, parent)
    return pages


def test_invalidating_a_page_invalidates_its_successors() -> None:
    """Held successors are included; its predecessors and its siblings remain."""
    pool = PagePool(8)
    first = chain(pool, [b"a", b"ab", b"abc"])
    sibling = chain(pool, [b"abd", b"abde"], b"ab")
    other = chain(pool, [b"x"])
    pool.release(sibling)
    pool.invalidate([first[1]])
    assert pool.lookup([b"a", b"ab"]) == first[:1]
    assert [pool.lookup([name]) for name in (b"abc", b"abd", b"abde")] == [[], [], []]
    assert pool.lookup([b"x"]) == other
    assert pool.num_free == 4
    assert sorted(pool.allocate(4)) == sorted(set(range(8)) - {*first, *other})


def test_invalidating_includes_successors_of_a_reused_page() -> None:
    """Otherwise the old successor would be found once that page is computed again."""
    pool = PagePool(3)
    first = chain(pool, [b"a", b"ab", b"abc"])
    pool._uncache([first[1]])
    pool.invalidate([first[0]])
    assert pool._page_of == {}


def test_invalidating_pages_without_a_name_changes_nothing() -> None:
    """Nothing else is touched."""
    pool = PagePool(3)
    (known,) = chain(pool, [b"a"])
    pool.invalidate(pool.allocate(1))
    assert pool.lookup([b"a"]) == [known]


def test_the_first_page_after_a_name_is_recorded_while_it_has_its_contents() -> None:
    """Its tokens grow; without a name they are lost with the last holder."""
    pool = PagePool(3)
    one, other = pool.allocate(2)
    pool.begin(one, b"a", b"12")
    pool.begin(other, b"a", b"1234")
    assert pool.beginning(b"a") == (one, b"12")
    pool.begin(one, b"a", b"123")
    assert pool.beginning(b"a") == (one, b"123")
    pool.share([one])
    pool.release([one])
    assert pool.beginning(b"a") == (one, b"123")
    pool.release([one])
    assert pool.beginning(b"a") is None
    pool.begin(other, b"a", b"1234")
    pool.register([other], [b"ab"], b"a")
    pool.release([other])
    assert pool.beginning(b"a") == (other, b"1234")
    pool.allocate(3)
    assert pool.beginning(b"a") is None


@pytest.mark.parametrize("lost", ["page", "before", "all"])
def test_an_invalid_page_has_no_beginning(lost: str) -> None:
    """It is lost with its own page, the page before it, or all names."""
    pool = PagePool(3)
    before, page = pool.allocate(2)
    pool.register([before], [b"a"])
    pool.begin(page, b"a", b"12")
    if lost == "all":
        pool.invalidate_all()
    else:
        pool.invalidate([page if lost == "page" else before])
    assert pool.beginning(b"a") is None


@pytest.mark.parametrize("num_pages", [1, 5])
def test_everything_can_be_allocated_and_nothing_more(num_pages: int) -> None:
    """`can_allocate` returns whether `allocate` succeeds."""
    pool = PagePool(num_pages)
    assert pool.can_allocate(num_pages)
    assert not pool.can_allocate(num_pages + 1)
    assert sorted(pool.allocate(num_pages)) == list(range(num_pages))
    assert pool.can_allocate(0)
    assert not pool.can_allocate(1)


NUM_PAGES = 6
NAMES = st.sampled_from([b"a", b"b", b"c", b"d"])


class PoolAgainstLists(RuleBasedStateMachine):
    """The pool compared with a model of plain lists: the holders of each page and the free pages.

    `held` are the sequences: each holds some pages once. `known` maps names to pages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.free = list(range(NUM_PAGES))
        self.held: list[list[int]] = []
        self.known: dict[bytes, int] = {}

    def holders(self, page: int) -> int:
        """Count the sequences that hold a page."""
        return sum(page in pages for pages in self.held)

    def names(self, page: int) -> list[bytes]:
        """Return the names under which a page is known."""
        return [name for name, known in self.known.items() if known == page]

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        """Start a sequence on the pages that have waited longest."""
        assert self.pool.can_allocate(count) == (count <= len(self.free))
        if count > len(self.free):
            return
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.allocate(count) == expected
        self.known = {name: page for name, page in self.known.items() if page not in expected}
        self.held.append(expected)

    @rule(names=st.lists(NAMES, max_size=4, unique=True))
    def share(self, names: list[bytes]) -> None:
        """Start a sequence on the known beginning of some names."""
        run_pages = self.pool.lookup(names)
        run = []
        for name in names:
            if name not in self.known:
                break
            run.append(self.known[name])
        assert run_pages == run
        assert self.pool.num_unheld(run_pages) == sum(page in self.free for page in run_pages)
        self.pool.share(run_pages)
        self.free = [page for page in self.free if page not in run_pages]
        self.held.append(run_pages)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), name=NAMES)
    def register(self, data: st.DataObject, name: bytes) -> None:
        """Name a held page that has no name yet."""
        page = data.draw(st.sampled_from(sorted({page for pages in self.held for page in pages})))
        if self.names(page):
            return
        self.pool.register([page], [name])
        self.known.setdefault(name, page)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """End a sequence."""
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(pages)
        for page in reversed(pages):
            if not self.holders(page):
                place = len(self.free) if self.names(page) else 0
                self.free.insert(place, page)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def invalidate(self, data: st.DataObject) -> None:
        """Lose the names of some pages that are held; each here follows none."""
        pages = sorted({page for pages in self.held for page in pages})
        lost = data.draw(st.lists(st.sampled_from(pages), max_size=2))
        self.pool.invalidate(lost)
        self.known = {name: page for name, page in self.known.items() if page not in lost}

    @rule()
    def invalidate_all(self) -> None:
        """Lose every name."""
        self.pool.invalidate_all()
        self.known = {}

    @invariant()
    def agrees(self) -> None:
        """A page is free or held, never both, with as many holders as sequences hold it."""
        assert self.pool.num_free == len(self.free)
        assert [*reversed(self.pool._uncached), *self.pool._cached] == self.free
        counts = [self.holders(page) for page in range(NUM_PAGES)]
        assert self.pool._holders == counts
        assert [page for page in range(NUM_PAGES) if not counts[page]] == sorted(self.free)
        assert self.pool._page_of == self.known
        named = {page: name for name, page in self.known.items()}
        assert self.pool._digest_of == [named.get(page) for page in range(NUM_PAGES)]


TestPoolAgainstLists = PoolAgainstLists.TestCase


def test_pages_with_other_images_have_other_names() -> None:
    """The names differ from the first page with a token of the image; others do not change."""
    tokens = np.arange(12, dtype=np.int32)
    plain = page_digests(b"", tokens, 4)
    assert page_digests(b"", tokens, 4, [b"", b"", b""]) == plain
    first, second = (page_digests(b"", tokens, 4, [b"", image, b""]) for image in (b"one", b"two"))
    assert first[0] == second[0] == plain[0]
    assert len({plain[1], first[1], second[1]}) == len({plain[2], first[2], second[2]}) == 3
