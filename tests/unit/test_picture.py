"""Pictures of a state: who holds what, how much, and a page that loads nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hyperstate as hs
from hyperstate.layout import Box, Layout, Mesh
from hyperstate.pictures.drawing import REGIONS, Drawn, colour, drawn, size, treemap
from hyperstate.pictures.picture import Picture
from hyperstate.simulate.placement import layout_of, parse_mesh

SHAPES = {"a.q_proj.weight": (7, 5), "a.o_proj.weight": (4, 6), "a.norm.weight": (9,), "scale": ()}


def picture(text: str, title: str = "a state") -> Picture:
    mesh = parse_mesh(text)
    tensors = [drawn(n, "float32", s, layout_of(mesh, n, s), mesh.ranks) for n, s in SHAPES.items()]
    return Picture(title, tuple(tensors), tuple(f"rank {rank}" for rank in mesh.ranks), mesh)


class Reader(HTMLParser):
    """Tags that were opened, in order; each must be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert [] == reader.open
    return reader


@pytest.mark.parametrize("text", ["fsdp=4", "replica=2,fsdp=2", "dp=2,tp=2", "replica=2,fsdp=2,tp=2", "fsdp=64"])
def test_memory_of_a_rank_is_the_sum_of_its_boxes(text: str) -> None:
    mesh = parse_mesh(text)
    layouts = {name: layout_of(mesh, name, shape) for name, shape in SHAPES.items()}
    expected = [sum(4 * layouts[n].box(s, rank).size for n, s in SHAPES.items()) for rank in mesh.ranks]
    assert expected == picture(text).memory


def test_text_shows_mesh_regions_memory_and_sizes() -> None:
    text = str(picture("dp=2,tp=2"))
    assert text.startswith("a state\n\nmesh dp=2, tp=2: 4 ranks\n  dp 0  0  1\n  dp 1  2  3\n")
    assert "a.q_proj.weight: float32 [7, 5], 140 B; 2 regions, each on 2 ranks\n" in text
    # Rows 0 to 3 of 7 are rank 0's, the rest rank 1's; of o_proj the columns are cut.
    grid = text.partition("a.q_proj.weight")[2].splitlines()[1:9]
    assert ["  " + "0" * 48] * 4 + ["  " + "1" * 48] * 4 == grid
    assert ["  " + "0" * 24 + "1" * 24] * 8 == text.partition("a.o_proj.weight")[2].splitlines()[1:9]
    assert re.search(r"memory per rank\n  rank 0 +168 B █+\n", text)
    assert re.search(r"sizes\n  a.q_proj.weight +140 B █+\n", text)


def test_tensors_that_look_alike_are_drawn_once() -> None:
    mesh = parse_mesh("fsdp=2")
    tensors = [
        drawn(f"layers.{i}.weight", "bfloat16", (8, 8), layout_of(mesh, "w", (8, 8)), mesh.ranks) for i in range(9)
    ]
    made = Picture("nine", tuple(tensors), ("rank 0", "rank 1"), mesh)
    assert [(9, "layers.0.weight")] == [(kind.count, kind.first.name) for kind in made.kinds]
    assert "layers.0.weight and 8 more like it" in str(made)


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    html = picture("replica=2,fsdp=2,tp=2").html()
    tags = read(html).tags
    assert {"svg", "rect", "title"} <= {tag for tag, _ in tags}
    assert {"html", "head", "meta", "title", "body", "div", "style", "h1", "h2", "p", "svg", "g", "rect", "text"} >= {
        tag for tag, _ in tags
    }
    links = [value for _, attrs in tags for name, value in attrs.items() if name in ("src", "href", "style", "onload")]
    assert [] == links
    assert {"http://www.w3.org/2000/svg"} == set(re.findall(r"https?://[^\"' ]+", html))
    assert "url(" not in html and "@import" not in html


def test_what_a_notebook_shows_is_the_page_without_its_frame() -> None:
    made = picture("fsdp=2")
    assert made._repr_html_() in made.html()
    assert "div" == read(made._repr_html_()).tags[0][0]


def test_names_can_t_break_out_of_the_page() -> None:
    evil = "</title><script>alert(1)</script>\"'&"
    mesh = parse_mesh("fsdp=2")
    tensor = drawn(evil, "float32", (4,), layout_of(mesh, evil, (4,)), mesh.ranks)
    tags = read(Picture(evil, (tensor,), (evil, evil + "2"), mesh).html()).tags
    assert "script" not in {tag for tag, _ in tags}


def test_thousands_of_ranks_make_a_page_of_bounded_size() -> None:
    made = picture("fsdp=4096,tp=2")
    assert len(made.html()) < 400_000
    assert len(str(made).splitlines()) < 150


def test_regions_beyond_what_can_be_seen_are_counted_instead() -> None:
    mesh = Mesh((REGIONS + 1,), tuple(range(REGIONS + 1)))
    shape = (4 * (REGIONS + 1), 2)
    tensor = drawn("w", "float32", shape, Layout(mesh, ((0,), ())), mesh.ranks)
    text = str(Picture("many", (tensor,), tuple(f"rank {rank}" for rank in mesh.ranks), mesh))
    assert f"{REGIONS + 1} regions" in text
    assert text.partition("regions")[2].splitlines()[1] == ""


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40), st.floats(1, 900), st.floats(1, 900))
def test_areas_of_the_map_of_sizes_are_in_proportion_and_fill_it(sizes: list[int], width: float, height: float) -> None:
    sizes = sorted(sizes, reverse=True)
    places = treemap(sizes, (0, 0, width, height))
    assert len(sizes) == len(places)
    for nbytes, (x, y, w, h) in zip(sizes, places, strict=True):
        assert nbytes / sum(sizes) == pytest.approx(w * h / (width * height), rel=1e-6)
        assert -1e-6 <= x and x + w <= width * (1 + 1e-9) and -1e-6 <= y and y + h <= height * (1 + 1e-9)


def test_neighbours_have_colours_apart() -> None:
    assert 12 == len({colour(number) for number in range(12)})


@pytest.mark.parametrize(
    ("nbytes", "said"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 40, "5.0 TiB"), (5 << 50, "5120.0 TiB")]
)
def test_sizes_in_words(nbytes: int, said: str) -> None:
    assert said == size(nbytes)


def test_a_plain_numpy_state_is_drawn_without_a_job() -> None:
    from hyperstate_numpy.kit import Kit

    kit = Kit()
    made = hs.visualize_sharding(hs.get_model_state_dict(kit.model()), title="plain")
    assert made.mesh is None
    assert [sum(4 * prod(one.shape) if one.dtype == "float32" else 8 for one in made.tensors)] == made.memory
    assert "layers.0.weight: float32 [7, 5], 140 B; whole" in str(made)


def test_a_state_without_tensors_is_refused() -> None:
    with hs.use_backend("numpy"), pytest.raises(hs.InvalidStateDictError, match="no tensor"):
        hs.visualize_sharding({"a": 1})


def test_files_are_called_by_what_tells_them_apart_and_a_whole_tensor_has_its_file_s_colour() -> None:
    names = [
        f"{section}/shard-0000{n}-model-00001-of-00001.safetensors" for section in ("model", "optim") for n in (1, 2)
    ]
    box = ((0, 0), (8, 8))
    tensors = tuple(Drawn(f"layer{n}.weight", "float32", (8, 8), ((Box(*box), (n,)),)) for n in range(4))
    made = Picture("files", tensors, tuple(names))
    short = ("model/shard-00001", "model/shard-00002", "optim/shard-00001", "optim/shard-00002")
    assert short == made.labels
    assert all(f">{name}</text>" in made.html() and colour(n) in made.html() for n, name in enumerate(short))
    assert "#d9d9d9" not in made.html()
    assert ("one-a",) == Picture("one", (), ("one-a",)).labels


def test_a_name_that_does_not_fit_is_cut_at_its_front() -> None:
    tensors = tuple(Drawn(f"model.layers.{n}.self_attn.q_proj.weight", "float32", (8, 8), ()) for n in range(9))
    labels = re.findall(r">([^<]*q_proj\.weight)</text>", Picture("names", tensors, ()).html())
    assert 9 == len(labels)
    assert all(label.startswith(("model.", "…")) for label in labels)
