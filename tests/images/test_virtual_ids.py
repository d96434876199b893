"""Virtual ids: the same for equal images, theirs as long as a request or a cached block has them."""

from array import array

import pytest

from nanoinfer.images import virtual_ids
from nanoinfer.images.virtual_ids import VirtualIds

IMAGE = (7, 7, 7)


def packed(*token_ids: int) -> bytes:
    return array("i", token_ids).tobytes()


def test_equal_images_have_equal_ids_and_others_have_others() -> None:
    ids = VirtualIds(first_id=100)
    first, again = ids.hold(b"cat", IMAGE), ids.hold(b"cat", IMAGE)
    assert first is again
    assert first.num_users == 2
    assert [*first.ids] == [100, 101, 102]
    assert [*ids.hold(b"dog", IMAGE).ids] == [103, 104, 105]


def test_a_span_of_other_tokens_is_another_image() -> None:
    """As of an image that a processor cuts into rows in another way."""
    ids = VirtualIds(first_id=100)
    assert ids.hold(b"cat", (7, 7, 8)) is not ids.hold(b"cat", (7, 8, 7))


def test_the_image_of_an_id_is_found() -> None:
    ids = VirtualIds(first_id=100)
    cat, dog = ids.hold(b"cat", IMAGE), ids.hold(b"dog", IMAGE)
    assert [ids.at(one) for one in (99, 100, 102, 103, 105)] == [None, cat, cat, dog, dog]


def test_ids_without_a_request_stay_theirs_while_a_cached_block_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_ids, "MIN_IDLE", 0)
    ids = VirtualIds(first_id=100)
    ids._max_idle = 0
    cat, dog, cow = (ids.hold(name, IMAGE) for name in (b"cat", b"dog", b"cow"))
    assert ids.release(cat)
    assert ids.release(dog)
    ids.forget_idle(lambda: [packed(1, 2, 103, 104)])
    assert [ids.at(103), ids.at(106)] == [dog, cow]
    assert len(ids) == 2
    assert ids.hold(b"dog", IMAGE) is dog
    assert ids.hold(b"cat", IMAGE) is not cat


def test_the_cache_is_looked_through_only_when_many_images_have_no_request() -> None:
    ids = VirtualIds(first_id=100)
    ids.release(ids.hold(b"cat", IMAGE))

    def cached_tokens() -> list[bytes]:
        raise AssertionError("the cache is looked through for one image")

    ids.forget_idle(cached_tokens)
    assert len(ids) == 1


def test_ids_come_again_when_all_have_been_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = VirtualIds(first_id=100, end=110)
    ids._max_idle = 0
    cat, dog, cow = (ids.hold(name, IMAGE) for name in (b"cat", b"dog", b"cow"))
    with pytest.raises(OverflowError, match="3 images"):
        ids.hold(b"fox", IMAGE)
    ids.release(dog)
    ids.forget_idle(lambda: [])
    assert [*ids.hold(b"fox", IMAGE).ids] == [*dog.ids]
    assert (ids.at(100), ids.at(106)) == (cat, cow)
