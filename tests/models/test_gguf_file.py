"""Reading GGUF files, compared with PyPI gguf's own reader and with types decoded by hand."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from gguf_bytes import gguf_bytes
from gguf_files import add_value, finish, random_model, tiny_config, write_model

from workbench.models import load_model
from workbench.models.gguf import types
from workbench.models.gguf.file import GGUFError, GGUFFile
from workbench.models.gguf.quantized import pack_quantized

SEED = 11


def write_tensors(path, tensors, metadata=None):
    """A file of raw tensors: {name: (stored array, ggml type name)}."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (metadata or {}).items():
        add_value(writer, key, value)
    for name, (data, type_name) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[type_name])
    finish(writer)
    return path


def test_metadata_and_tensors_equal_those_of_the_gguf_package(tmp_path):
    rng = np.random.default_rng(SEED)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {
        "a.uint8": (writer.add_uint8, 200),
        "a.int8": (writer.add_int8, -100),
        "a.uint16": (writer.add_uint16, 60000),
        "a.int16": (writer.add_int16, -30000),
        "a.uint32": (writer.add_uint32, 2**32 - 1),
        "a.int32": (writer.add_int32, -(2**31)),
        "a.uint64": (writer.add_uint64, 2**63),
        "a.int64": (writer.add_int64, -(2**62)),
        "a.float32": (writer.add_float32, 0.1),
        "a.float64": (writer.add_float64, 0.1),
        "a.true": (writer.add_bool, True),
        "a.text": (writer.add_string, "ε ▁ \n"),
        "a.ints": (writer.add_array, [1, -2, 3]),
        "a.floats": (writer.add_array, [0.5, -0.25]),
        "a.texts": (writer.add_array, ["", "ä", "b c"]),
        "a.nested": (writer.add_array, [[1, 2], [3]]),
    }
    for key, (add, value) in values.items():
        add(key, value)
    for number, shape in enumerate([(64,), (3, 32), (2, 3, 32)]):
        writer.add_tensor(f"t{number}", rng.standard_normal(shape).astype(np.float32))
    finish(writer)

    ours, theirs = GGUFFile(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    for key in values:
        if key != "a.nested":  # the package's reader does not return nested arrays
            assert ours.metadata[key] == theirs.fields[key].contents(), key
    assert ours.metadata["a.nested"] == [[1, 2], [3]]
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in reversed(tensor.shape))
        np.testing.assert_array_equal(mine.float32(), tensor.data)


def test_the_bundled_file_equals_what_the_gguf_package_reads(smollm2):
    ours, theirs = GGUFFile(smollm2.source), gguf.GGUFReader(smollm2.source)
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    for key, value in ours.metadata.items():
        assert value == theirs.fields[key].contents(), key
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.tensors[tensor.name].raw, tensor.data)


def test_half_a_character_in_each_of_two_texts_is_refused(tmp_path):
    """Together, they would be valid."""
    good = gguf_bytes({"tokenizer.ggml.tokens": ["xy", "zz"]}, [])
    assert GGUFFile(write_bytes(tmp_path, good)).metadata["tokenizer.ggml.tokens"] == ["xy", "zz"]
    for bad in (good.replace(b"xy", b"x\xc3").replace(b"zz", b"\xa9z"), good.replace(b"zz", b"z\xc3")):
        with pytest.raises(GGUFError, match="damaged or cut short"):
            GGUFFile(write_bytes(tmp_path, bad))


def write_bytes(folder, data):
    (folder / "m.gguf").write_bytes(data)
    return folder / "m.gguf"


@pytest.mark.parametrize("type_name", [kind.name for kind in gguf.GGMLQuantizationType])
def test_every_type_is_dequantised_or_refused_by_name(tmp_path, type_name):
    """Rows of any type can be read in another order before they are dequantised."""
    rng = np.random.default_rng(SEED)
    kind = gguf.GGMLQuantizationType[type_name]
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = 2 * elements if elements > 1 else 32
    raw = rng.integers(0, 120, (5, columns // elements * num_bytes), dtype=np.uint8)  # no NaN in any float type
    path = write_tensors(tmp_path / "m.gguf", {"t": (raw, type_name)})
    tensor = GGUFFile(path).tensors["t"]
    assert tensor.type_name == type_name
    assert tensor.shape == (5, columns)
    order = np.array([3, 0, 4, 1, 2])
    try:
        expected = dequantize(raw, kind)
    except NotImplementedError:
        with pytest.raises(GGUFError, match=f"tensor 't' has ggml type {type_name}, which"):
            tensor.float32()
        return
    assert expected.shape == tensor.shape
    np.testing.assert_array_equal(tensor.float32(), expected)
    np.testing.assert_array_equal(tensor.float32(order), expected[order])


# -- Q4_K and Q6_K, the types of most files, element by element from the format's definition -----------------


def q4_k_element(block: bytes, index: int) -> float:
    """Super-block of 256: half d, half dmin, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles."""
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float64)
    packed, group = block[4:16], index // 32
    if group < 4:
        scale, minimum = packed[group] & 63, packed[group + 4] & 63
    else:
        scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4)
        minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4)
    byte = block[16 + index // 64 * 32 + index % 32]
    nibble = byte & 15 if group % 2 == 0 else byte >> 4
    return d * scale * nibble - dmin * minimum


def q6_k_element(block: bytes, index: int) -> float:
    """Super-block of 256: 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 int8 scales, half d."""
    half, within = divmod(index, 128)
    quarter, lane = divmod(within, 32)
    low = block[64 * half + 32 * (quarter % 2) + lane]
    low = low & 15 if quarter < 2 else low >> 4
    high = block[128 + 32 * half + lane] >> (2 * quarter) & 3
    scale = np.frombuffer(block[192:208], np.int8)[8 * half + 2 * quarter + lane // 16]
    d = np.frombuffer(block[208:210], np.float16)[0]
    return float(d) * float(scale) * ((low | high << 4) - 32)


@pytest.mark.parametrize(
    ("type_name", "element", "halves"), [("Q4_K", q4_k_element, (0, 2)), ("Q6_K", q6_k_element, (208,))]
)
def test_k_quants_equal_the_definition_of_the_format(tmp_path, type_name, element, halves):
    rng = np.random.default_rng(SEED)
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][1]
    raw = rng.integers(0, 256, (2, num_bytes), dtype=np.uint8)
    for row in raw:
        for offset in halves:
            row[offset : offset + 2] = np.frombuffer(np.float16(rng.uniform(0.001, 0.1)).tobytes(), np.uint8)
    path = write_tensors(tmp_path / "m.gguf", {"t": (raw, type_name)})
    expected = [[element(row.tobytes(), index) for index in range(256)] for row in raw]
    np.testing.assert_allclose(GGUFFile(path).tensors["t"].float32(), expected, rtol=1e-5, atol=1e-6)


# -- the types MLX keeps quantised ---------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
def test_packing_equals_what_mlx_itself_loads(tmp_path, type_name):
    rng = np.random.default_rng(SEED)
    values = rng.standard_normal((24, 96)).astype(np.float32)
    data = quantize(values, gguf.GGMLQuantizationType[type_name])
    path = write_tensors(tmp_path / "m.gguf", {"t.weight": (data, type_name)})
    mlx_loaded = mx.load(str(path))
    packed = pack_quantized(GGUFFile(path).tensors["t.weight"], None, mx.float16)
    for part in ("weight", "scales", "biases"):
        np.testing.assert_array_equal(np.array(packed[part]), np.array(mlx_loaded[f"t.{part}"]), err_msg=part)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_rows_can_be_reordered(tmp_path, type_name):
    rng = np.random.default_rng(SEED)
    data = quantize(rng.standard_normal((8, 64)).astype(np.float32), gguf.GGMLQuantizationType[type_name])
    tensor = GGUFFile(write_tensors(tmp_path / "m.gguf", {"t": (data, type_name)})).tensors["t"]
    order = rng.permutation(8)
    packed = pack_quantized(tensor, order, mx.float32)
    bits = 8 if type_name == "Q8_0" else 4
    back = mx.dequantize(packed["weight"], packed["scales"], packed["biases"], group_size=32, bits=bits)
    np.testing.assert_allclose(np.array(back), tensor.float32(order), atol=1e-6)


@pytest.mark.repeats(every="value")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_model_that_stays_quantised_computes_the_same(tmp_path, architecture, type_name):
    config = tiny_config(architecture)
    path = tmp_path / "m.gguf"
    write_model(path, architecture, config, random_model(config), matrix_type=type_name)
    with pytest.deprecated_call():
        kept = load_model(path, dtype="float32", keep_quantized=True)
    floats = load_model(path, weights="float32")
    assert kept.quantized == ("8 bits" if type_name == "Q8_0" else "4 bits")
    assert floats.quantized == ""
    assert kept.num_parameters == floats.num_parameters
    tokens = mx.array(np.random.default_rng(SEED).integers(0, 262, (1, 12)))
    np.testing.assert_allclose(np.array(kept.model(tokens)), np.array(floats.model(tokens)), atol=3e-5)


# -- damage --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    config = tiny_config("qwen3")
    write_model(path, "qwen3", config, random_model(config))
    return path.read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.02, 0.5, 0.999])
def test_a_file_cut_short_is_refused(tmp_path, whole, share):
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(GGUFError, match=r"cut\.gguf"):
        GGUFFile(path)


def test_random_damage_to_the_header_never_escapes_as_another_error(tmp_path, whole):
    rng = np.random.default_rng(SEED)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for position in rng.integers(0, 2000, 3):
            data[position] = rng.integers(0, 256)
        path = tmp_path / "damaged.gguf"
        path.write_bytes(data)
        try:
            GGUFFile(path)
        except GGUFError:
            refused += 1
    assert refused > 20


def test_other_versions_and_files_are_refused(tmp_path, whole):
    path = tmp_path / "x.gguf"
    path.write_bytes(whole[:4] + b"\x09\0\0\0" + whole[8:])
    with pytest.raises(GGUFError, match="GGUF version 9"):
        GGUFFile(path)
    path.write_bytes(b"PK\3\4" + whole[4:])
    with pytest.raises(GGUFError, match="is not a GGUF file"):
        GGUFFile(path)
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "none.gguf")


def test_a_big_endian_file_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("t", np.ones((2, 32), np.float32))
    finish(writer)
    with pytest.raises(GGUFError, match="is big-endian, and only little-endian GGUF files can be read"):
        GGUFFile(tmp_path / "big.gguf")


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [("weight.1", "weight.2", r"tensor 'weight\.1' occurs twice"), ("key.1", "key.2", r"metadata key\.1 occurs twice")],
)
def test_a_name_that_occurs_twice_is_refused(tmp_path, name, other, message):
    tensors = {f"weight.{number}": (np.full((2, 32), number, np.float32), "F32") for number in (1, 2)}
    path = write_tensors(tmp_path / "m.gguf", tensors, {"key.1": 1, "key.2": 2})
    path.write_bytes(path.read_bytes().replace(other.encode(), name.encode()))
    with pytest.raises(GGUFError, match=message):
        GGUFFile(path)


def test_a_type_that_the_gguf_package_does_not_know_is_refused(tmp_path):
    path = write_tensors(tmp_path / "m.gguf", {"odd.weight": (np.ones((2, 32), np.float32), "F32")})
    data = path.read_bytes()
    place = data.index(b"odd.weight") + len("odd.weight") + 4 + 2 * 8
    path.write_bytes(data[:place] + b"\xe7\x03\0\0" + data[place + 4 :])
    with pytest.raises(GGUFError, match=r"tensor 'odd\.weight' has ggml type 999"):
        GGUFFile(path)


# -- models in several files ---------------------------------------------------------------------------------


def write_parts(folder, num_parts=3):
    rng = np.random.default_rng(SEED)
    tensors = {f"t{number}": rng.standard_normal((2, 32)).astype(np.float32) for number in range(num_parts)}
    for number in range(num_parts):
        path = folder / f"big-{number + 1:05d}-of-{num_parts:05d}.gguf"
        name = f"t{number}"
        write_tensors(path, {name: (tensors[name], "F32")}, {"split.count": num_parts, "split.no": number})
    return folder / f"big-00001-of-{num_parts:05d}.gguf", tensors


def test_a_split_model_is_read_whole(tmp_path):
    first, tensors = write_parts(tmp_path)
    file = GGUFFile(first)
    assert set(file.tensors) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(file.tensors[name].float32(), values)


def test_a_split_model_needs_its_first_part_and_all_others(tmp_path):
    write_parts(tmp_path)
    with pytest.raises(GGUFError, match=r"one of 3 parts: give the first one, which ends in -00001-of-00003\.gguf"):
        GGUFFile(tmp_path / "big-00002-of-00003.gguf")
    (tmp_path / "big-00003-of-00003.gguf").unlink()
    with pytest.raises(FileNotFoundError, match="big-00003-of-00003"):
        GGUFFile(tmp_path / "big-00001-of-00003.gguf")


def test_a_part_in_the_place_of_another_is_refused(tmp_path):
    first, _ = write_parts(tmp_path)
    second, third = (tmp_path / f"big-0000{number}-of-00003.gguf" for number in (2, 3))
    third.write_bytes(second.read_bytes())
    with pytest.raises(GGUFError, match=r"00003-of-00003\.gguf: metadata split\.no=1 must be 2 in part 3 of 3"):
        GGUFFile(first)


def test_the_tables_of_types_are_those_of_the_gguf_package():
    known = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert types.GGML_TYPES.items() <= known.items()
    assert all(types.ggml_type(number) == kind for number, kind in known.items())
    assert {kind.name: int(kind) for kind in types.TokenType} == {kind.name: int(kind) for kind in gguf.TokenType}
