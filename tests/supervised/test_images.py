"""Images: read as they were written, refused where damaged; crops, patches and clutter beside slow loops."""

import gzip
import hashlib
import io
import re
import socket
import struct
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import load_supervised

torch = pytest.importorskip("torch")

images, chance = load_supervised("images"), load_supervised("chance")
RNG = np.random.default_rng(0)
MEMBERS = {
    "cifar10": [
        "cifar-10-batches-bin/data_batch_1.bin",
        "cifar-10-batches-bin/data_batch_2.bin",
        "cifar-10-batches-bin/data_batch_3.bin",
        "cifar-10-batches-bin/data_batch_4.bin",
        "cifar-10-batches-bin/data_batch_5.bin",
        "cifar-10-batches-bin/test_batch.bin",
    ],
    "cifar100": ["cifar-100-binary/train.bin", "cifar-100-binary/test.bin"],
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def uniform(*shape, seed=0):
    """Numbers from U[0, 1), as a data set's chance draws them."""
    return torch.rand(shape, generator=seeded(seed))


def hidden(pixels, others, canvas, size, seed=0):
    """Clutter by numbers of chance."""
    return images.clutter(pixels, others, canvas, size, uniform(len(pixels), images.num_hide(canvas, size), seed=seed))


def noise(*shape, dtype=torch.float32):
    """Pixels that are all different, so that one in a wrong place shows."""
    return torch.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


def records(name, count):
    """The bytes of `count` records and what should be read from them: pixels (count, 3, 32, 32), labels."""
    classes, superclasses = {"cifar10": (10, 0), "cifar100": (100, 20)}[name]
    pixels = RNG.integers(256, size=(count, 3, 32, 32), dtype=np.uint8)
    labels = RNG.integers(classes, size=count, dtype=np.uint8)
    data = b""
    for image, label in zip(pixels, labels, strict=True):
        data += bytes([RNG.integers(superclasses)] if superclasses else []) + bytes([label])
        for channel in image:
            for row in channel:
                data += bytes(row.tolist())
    return data, pixels, labels


def pack(monkeypatch, folder, name, contents):
    """Write an archive whose members have these contents, and let its checksum be the right one."""
    path = folder / images.CIFAR[name].file
    with tarfile.open(path, "w:gz") as tar:
        for member, data in {"readme.html": b"not data", **contents}.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    expect(monkeypatch, name, path.read_bytes())
    return path


def expect(monkeypatch, name, data):
    monkeypatch.setitem(images.CIFAR, name, images.CIFAR[name]._replace(md5=hashlib.md5(data).hexdigest()))


@pytest.fixture(params=["cifar10", "cifar100"])
def cifar(request, monkeypatch, tmp_path):
    """A tiny archive: its data set's name, path, members' contents, and what should be read of each."""
    written = {member: records(request.param, 2 + number) for number, member in enumerate(MEMBERS[request.param])}
    contents = {member: data for member, (data, _, _) in written.items()}
    contents = dict(reversed(contents.items()))  # the order in the archive must not matter
    return request.param, pack(monkeypatch, tmp_path, request.param, contents), contents, list(written.values())


def test_cifar_is_read_back(cifar):
    name, path, _, written = cifar
    found = images.load(name, path.parent)
    *train, (_, test_pixels, test_labels) = written
    np.testing.assert_array_equal(found.train, np.concatenate([pixels for _, pixels, _ in train]))
    np.testing.assert_array_equal(found.train_labels, np.concatenate([labels for _, _, labels in train]))
    np.testing.assert_array_equal(found.test, test_pixels)
    np.testing.assert_array_equal(found.test_labels, test_labels)
    assert found.train.dtype == found.test.dtype == torch.uint8
    assert found.train_labels.dtype == found.test_labels.dtype == torch.int64
    assert (found.num_classes, found.flip) == ({"cifar10": 10, "cifar100": 100}[name], True)
    assert found.train.is_contiguous() and found.test.is_contiguous()
    assert list(path.parent.iterdir()) == [path]  # nothing is unpacked


def test_a_damaged_archive_is_refused(cifar, monkeypatch):
    name, path, _, _ = cifar
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} is incomplete or another file: its MD5 is"):
        images.load(name, path.parent)
    path.write_bytes(whole)
    expect(monkeypatch, name, b"another")
    with pytest.raises(
        ValueError, match=f"{re.escape(str(path))} is .*, expected {hashlib.md5(b'another').hexdigest()}"
    ):
        images.load(name, path.parent)
    assert path.read_bytes() == whole  # refused, not removed


@pytest.mark.parametrize("name", ["../{}", "/tmp/{}", "a/../../{}"])
def test_a_member_with_a_strange_path_is_written_nowhere(cifar, monkeypatch, tmp_path, name):
    data_set, _, contents, _ = cifar
    pack(monkeypatch, tmp_path, data_set, {name.format(member): data for member, data in contents.items()})
    before = sorted(tmp_path.rglob("*"))
    assert len(images.load(data_set, tmp_path).train)
    assert sorted(tmp_path.rglob("*")) == before and not (Path("/tmp") / next(iter(contents))).exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_a_member_that_is_no_file_is_refused(cifar, monkeypatch, kind):
    data_set, path, contents, _ = cifar
    member = next(iter(contents))
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo(member)
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    expect(monkeypatch, data_set, path.read_bytes())
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} has no "):
        images.load(data_set, path.parent)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (2**20, " is incomplete or not an archive: unexpected end of data"),
        (2**60, f": .* has {2**60} bytes, expected at most"),
    ],
)
def test_a_member_that_promises_more_than_follows_is_refused(cifar, monkeypatch, size, message):
    data_set, path, contents, _ = cifar
    info = tarfile.TarInfo(next(iter(contents)))
    info.size = size
    path.write_bytes(gzip.compress(info.tobuf() + bytes(512)))
    expect(monkeypatch, data_set, path.read_bytes())
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}{message}"):
        images.load(data_set, path.parent)


def test_a_file_that_unpacks_to_too_much_is_refused(fashion, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MAX_BYTES", 10**6)
    arrays, write = fashion
    path = write(tmp_path / "data", next(iter(arrays)), bytes(10**6 + 1), ".gz")
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} unpacks to more than 1000000 bytes"):
        images.load("fashion-mnist", tmp_path / "data")


def test_a_missing_member_is_refused(cifar, monkeypatch):
    name, path, contents, _ = cifar
    for gone in MEMBERS[name]:
        pack(monkeypatch, path.parent, name, {member: data for member, data in contents.items() if member != gone})
        with pytest.raises(ValueError, match=f"{re.escape(str(path))} has no {Path(gone).name}"):
            images.load(name, path.parent)


@pytest.mark.parametrize("size", [0, -1, 3072])
def test_a_member_of_wrong_size_is_refused(cifar, monkeypatch, size):
    name, path, contents, _ = cifar
    for short in MEMBERS[name]:
        pack(monkeypatch, path.parent, name, contents | {short: contents[short][:size]})
        with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {Path(short).name} has \\d+ bytes"):
            images.load(name, path.parent)


def test_a_label_too_high_is_refused(cifar, monkeypatch):
    name, path, contents, _ = cifar
    labels = {"cifar10": bytes([10]), "cifar100": bytes([0, 100])}[name]
    pack(monkeypatch, path.parent, name, contents | {MEMBERS[name][-1]: labels + bytes(3072)})
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} has a label {labels[-1]}"):
        images.load(name, path.parent)


def test_the_official_checksums():
    """As https://www.cs.toronto.edu/~kriz/cifar.html lists them."""
    assert images.CIFAR["cifar10"].md5 == "c32a1d4ab5d03f1284b67883e8d87530"
    assert images.CIFAR["cifar100"].md5 == "03b5dce01913d631647c71ecec9e9cb8"


def idx(array, magic=None):
    """The bytes of an idx file, its header big-endian."""
    return struct.pack(f">{1 + array.ndim}I", magic or 0x800 + array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def fashion(monkeypatch, tmp_path):
    """The four arrays of a tiny Fashion-MNIST, 259 and 2 images, and what writes one of its files."""
    monkeypatch.setattr(images, "DEBIAN", tmp_path / "debian")
    arrays = {}
    for part, count in (("train", 259), ("t10k", 2)):  # 259 is 3 in a byte, and another number low byte first
        arrays[f"{part}-images-idx3-ubyte"] = RNG.integers(256, size=(count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = RNG.integers(10, size=count, dtype=np.uint8)

    def write(folder, name, data, suffix):
        monkeypatch.setitem(images.FASHION, name, hashlib.md5(data).hexdigest())
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}{suffix}"
        path.write_bytes(gzip.compress(data) if suffix else data)
        return path

    return arrays, write


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("folder", ["data", "debian"])
def test_fashion_mnist_is_read_back(fashion, tmp_path, folder, suffix):
    arrays, write = fashion
    for name, array in arrays.items():
        write(tmp_path / folder, name, idx(array), suffix)
    found = images.load("fashion-mnist", tmp_path / "data")
    for tensor, array in zip(found[:4], arrays.values(), strict=True):
        np.testing.assert_array_equal(tensor, array[:, None] if array.ndim == 3 else array)
    assert found.train.shape == (259, 1, 28, 28) and found.train.dtype == found.test.dtype == torch.uint8
    assert found.train_labels.dtype == found.test_labels.dtype == torch.int64
    assert (found.num_classes, found.flip) == (10, True)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda array: idx(array, 0x900 + array.ndim), "starts with 0x90"),
        (lambda array: idx(array, 0x802), "starts with 0x802"),
        (lambda array: idx(array)[:3], "starts with 0x800"),
        (lambda array: idx(array)[:-1], "bytes after its header"),
        (lambda array: idx(array) + b"\0", "bytes after its header"),
        (lambda array: idx(array[:0]), "labels, expected"),
    ],
    ids=["type", "dimensions", "empty", "short", "long", "none"],
)
def test_a_wrong_idx_file_is_refused(fashion, tmp_path, number, suffix, damage, message):
    arrays, write = fashion
    paths = [write(tmp_path / "data", name, idx(array), suffix) for name, array in arrays.items()]
    name = list(arrays)[number]
    write(tmp_path / "data", name, damage(arrays[name]), suffix)
    culprit = paths[number + 1] if message == "labels, expected" and number % 2 == 0 else paths[number]
    with pytest.raises(ValueError, match=f"{re.escape(str(culprit))} .*{message}"):
        images.load("fashion-mnist", tmp_path / "data")


def test_an_idx_label_too_high_is_refused(fashion, tmp_path):
    arrays, write = fashion
    paths = [write(tmp_path, name, idx(array), "") for name, array in arrays.items()]
    write(tmp_path, paths[3].name, idx(np.array([3, 10], np.uint8)), "")
    with pytest.raises(ValueError, match=f"{re.escape(str(paths[3]))} has a label 10"):
        images.load("fashion-mnist", tmp_path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_damaged_idx_file_is_refused(fashion, tmp_path, suffix):
    arrays, write = fashion
    paths = [write(tmp_path / "data", name, idx(array), suffix) for name, array in arrays.items()]
    for path in paths:
        whole = path.read_bytes()
        for data in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"not an idx file"):
            path.write_bytes(data)
            with pytest.raises(ValueError, match=f"{re.escape(str(path))} is incomplete"):
                images.load("fashion-mnist", tmp_path / "data")
        path.write_bytes(whole)


def test_digits():
    datasets = pytest.importorskip("sklearn.datasets")
    found = images.load("digits", Path("nowhere"))
    assert found.train.shape == (1437, 1, 8, 8) and found.test.shape == (360, 1, 8, 8)
    assert found.train.dtype == found.test.dtype == torch.uint8
    assert found.train_labels.dtype == found.test_labels.dtype == torch.int64
    pixels, labels = torch.cat([found.train, found.test]), torch.cat([found.train_labels, found.test_labels])
    source = datasets.load_digits()
    assert (pixels.min(), pixels.max()) == (0, 255)
    known = {image.tobytes(): place for place, image in enumerate(source.images)}
    order = [known[image.tobytes()] for image in np.round(pixels[:, 0].double().numpy() * 16 / 255)]
    assert sorted(order) == list(range(1797))  # all of them, once
    np.testing.assert_allclose(pixels[:, 0] / 255, source.images[order] / 16, atol=0.5 / 255 + 1e-6)
    np.testing.assert_array_equal(labels, source.target[order])
    assert 0.7 < np.mean(np.array(order[1437:]) < 1437) < 0.9  # shuffled: the last of the file are not the test set
    assert len(torch.unique(pixels.flatten(1), dim=0)) == 1797  # so none is in both
    assert torch.bincount(found.test_labels, minlength=10).min() >= 25
    assert (found.num_classes, found.flip) == (10, False)
    for first, second in zip(found, images.load("digits", Path("nowhere")), strict=True):
        assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))


def test_digits_name_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn"):
        images.load("digits", Path("nowhere"))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="dataset='mnist': expected one of cifar10, cifar100, fashion-mnist, digits"):
        images.load("mnist", Path("nowhere"))


URLS = {"cifar10": "CIFAR_URL", "cifar100": "CIFAR_URL", "fashion-mnist": "FASHION_URL"}


@pytest.mark.parametrize("name", URLS)
def test_what_is_missing_is_told_at_once(monkeypatch, tmp_path, name):
    monkeypatch.setattr(images, "DEBIAN", tmp_path / "debian")
    monkeypatch.setattr(images, "_fetch", lambda url, path: pytest.fail("nobody asked for it"))
    folder = tmp_path / "data"
    with pytest.raises(FileNotFoundError) as told:
        images.load(name, folder)
    for word in (f"{folder}/", "--data-dir", getattr(images, URLS[name])):
        assert word in str(told.value)
    assert ("dataset-fashion-mnist" in str(told.value)) == (name == "fashion-mnist")
    assert not folder.exists()


@pytest.fixture
def server():
    """What makes a server that sends some bytes to each caller and then keeps silent: its port."""
    sockets = []

    def serve(sent):
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def answer():
            try:
                while True:
                    caller, _ = listener.accept()
                    sockets.append(caller)
                    caller.recv(4096)
                    caller.sendall(sent)
            except OSError:  # closed
                pass

        threading.Thread(target=answer, daemon=True).start()
        return listener.getsockname()[1]

    yield serve
    sockets[0].shutdown(socket.SHUT_RDWR)  # wakes the thread
    for one in sockets:
        one.close()


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Try to fetch from a URL: the words of the error, and the seconds that it took."""
    monkeypatch.setattr(images, "DEBIAN", tmp_path / "debian")
    monkeypatch.setenv("no_proxy", "*")

    def attempt(name, url):
        monkeypatch.setattr(images, URLS[name], url)
        folder = tmp_path / "data"
        start = time.monotonic()
        with pytest.raises(ConnectionError) as told:
            images.load(name, folder, download=True)
        for word in (f"{folder}/", "--data-dir", url):
            assert word in str(told.value)
        assert not folder.exists()
        return str(told.value), time.monotonic() - start

    return attempt


@pytest.mark.parametrize("name", URLS)
def test_a_refused_connection_is_told_at_once(offline, name):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words, seconds = offline(name, f"http://127.0.0.1:{port}/")
    assert "refused" in words and seconds < 2


def test_silence_is_told_within_five_seconds(offline, server):
    words, seconds = offline("cifar10", f"http://127.0.0.1:{server(b'')}/")
    assert "could not be downloaded" in words and seconds < 5


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\nhalf", "timed out"),
        (b"HTTP/1.0 404 Not Found\r\nContent-Length: 0\r\n\r\n", "404"),
        (b"no http at all\r\n", "no http"),
    ],
)
def test_an_answer_that_is_none_is_told(monkeypatch, offline, server, sent, message):
    monkeypatch.setattr(images, "TIMEOUT", 0.3)
    words, seconds = offline("cifar10", f"http://127.0.0.1:{server(sent)}/")
    assert message in words and seconds < 2


def test_a_slow_name_server_is_told_within_patience(monkeypatch, offline):
    """As where there is no network: the look-up alone may take longer than any limit of a socket."""
    waiting = threading.Event()

    def look_up(*_, **__):
        waiting.wait(20)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(images, "TIMEOUT", 0.3)
    words, seconds = offline("cifar10", "http://nowhere.invalid/")
    waiting.set()
    assert "no answer" in words and seconds < 2


def test_a_download_is_kept(cifar, monkeypatch, tmp_path, capsys):
    name, path, _, _ = cifar
    monkeypatch.setattr(images, "CIFAR_URL", f"{tmp_path.as_uri()}/")
    folder = tmp_path / "new" / "data"
    fetched = images.load(name, folder, download=True)
    assert "downloading file:" in capsys.readouterr().err
    assert [file.name for file in folder.iterdir()] == [path.name]
    assert (folder / path.name).read_bytes() == path.read_bytes()
    path.unlink()
    kept = images.load(name, folder, download=True)
    assert torch.equal(fetched.train, kept.train) and not capsys.readouterr().err


def test_a_download_that_is_wrong_is_not_kept(cifar, monkeypatch, tmp_path):
    name, path, _, _ = cifar
    monkeypatch.setattr(images, "CIFAR_URL", f"{tmp_path.as_uri()}/")
    expect(monkeypatch, name, b"another")
    with pytest.raises(ValueError, match=f"{re.escape(path.as_uri())} is incomplete or another file"):
        images.load(name, tmp_path / "data", download=True)
    assert not (tmp_path / "data").exists()


def test_statistics_and_normalise():
    levels = RNG.beta([[2], [5], [1]], [[3], [1], [9]], size=(40, 3, 64)) * 255
    pixels = torch.from_numpy(levels.astype(np.uint8).reshape(40, 3, 8, 8))
    mean, std = images.channel_statistics(pixels)
    assert mean.shape == std.shape == (3,) and mean.dtype == std.dtype == torch.float32
    np.testing.assert_allclose(mean, pixels.numpy().mean(axis=(0, 2, 3)) / 255, atol=1e-6)
    np.testing.assert_allclose(std, pixels.numpy().std(axis=(0, 2, 3)) / 255, atol=1e-6)
    normal = images.normalize(pixels, mean, std)
    assert normal.dtype == torch.float32 and normal.shape == pixels.shape
    np.testing.assert_allclose(normal.mean(dim=(0, 2, 3)), 0, atol=1e-4)
    np.testing.assert_allclose(normal.std(dim=(0, 2, 3)), 1, atol=1e-2)
    np.testing.assert_allclose(normal[5, 1], (pixels[5, 1].numpy() / 255 - mean[1].item()) / std[1].item(), atol=1e-4)


def test_a_constant_channel_is_refused():
    pixels = torch.stack([noise(2, 4, 4, dtype=torch.uint8), torch.full((2, 4, 4), 7, dtype=torch.uint8)], dim=1)
    with pytest.raises(ValueError, match="expected channels that vary"):
        images.channel_statistics(pixels)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_augment_beside_a_loop(padding, flip, dtype):
    pixels = (noise(64, 3, 8, 8) + 1).to(dtype)
    before = pixels.clone()
    numbers = uniform(64, images.NUM_CROP)
    found = images.augment(pixels, numbers, padding, flip)
    for image in range(64):
        bounds = (2 * padding + 1, 2 * padding + 1, 2)
        top, left, mirrored = (int(u * bound) for u, bound in zip(numbers[image].tolist(), bounds, strict=True))
        expected = torch.zeros(3, 8, 8, dtype=dtype)
        for row in range(8):
            for column in range(8):
                y, x = row + top - padding, column + left - padding
                if 0 <= y < 8 and 0 <= x < 8:
                    expected[:, row, 7 - column if flip and mirrored else column] = pixels[image, :, y, x]
        assert torch.equal(found[image], expected)
    assert torch.equal(pixels, before) and found.dtype == dtype


def test_augment_draws_all_offsets_and_half_of_the_mirrors():
    pixels = torch.zeros(4000, 1, 5, 5)
    pixels[:, :, 2, 2], pixels[:, :, 2, 3] = 1, 2  # an arrow to the right
    found = images.augment(pixels, uniform(4000, images.NUM_CROP), 1, flip=True)
    at = (found == 1).flatten(1).int().argmax(1)
    counts = torch.bincount(at, minlength=25).reshape(5, 5)
    assert counts[1:4, 1:4].min() > 0.8 * 4000 / 9 and counts[1:4, 1:4].sum() == 4000
    right = ((found == 2).flatten(1).int().argmax(1) > at).float().mean()
    assert 0.45 < right < 0.55


def test_all_runs_where_the_images_are():
    """The device "meta" computes nothing, and mixes with no other."""
    pixels = torch.zeros(4, 3, 8, 8, device="meta")
    assert images.augment(pixels, torch.zeros(4, images.NUM_CROP, device="meta"), 2, flip=True).shape == (4, 3, 8, 8)
    assert images.normalize(pixels, torch.zeros(3), torch.ones(3)).device.type == "meta"
    numbers = torch.zeros(4, images.num_hide(16, 4), device="meta")
    canvases, signal = images.clutter(pixels, pixels, 16, 4, numbers)
    assert canvases.device.type == signal.device.type == "meta"
    assert canvases.shape == (4, 3, 16, 16) and signal.shape == (4, 16)


@pytest.mark.parametrize("number", [0.0, 1 - 2**-24])
def test_the_least_and_the_largest_number_are_in_range(number):
    """An image at an edge, the first or the last piece: a float32 must not round up to the bound."""
    pixels, others = -torch.ones(2, 1, 4, 4), noise(50_000, 1, 2, 2)
    numbers = torch.full((2, images.num_hide(8, 2)), number)
    canvases, signal = images.clutter(pixels, others, 8, 2, numbers)
    tokens = images.patches(canvases, 2)
    expected = others[0 if number == 0 else -1].flatten()
    assert torch.equal(tokens[~signal], expected.expand(24, -1))
    assert signal[0, 0 if number == 0 else -1]
    for bound in (*range(1, 2000), 50_000, 2**20 - 1, 2**20):
        assert chance.below(torch.tensor(number), bound) == (bound - 1 if number else 0)


@pytest.mark.parametrize(("channels", "side", "size"), [(3, 32, 4), (1, 28, 7), (2, 6, 2), (3, 4, 4), (1, 4, 1)])
def test_patches_row_by_row(channels, side, size):
    pixels = noise(2, channels, side, side)
    cut = images.patches(pixels, size)
    along = images.patches_per_side(side, size)
    assert cut.shape == (2, along**2, channels * size**2) and along * size == side
    for number in range(along**2):
        top, left = number // along * size, number % along * size
        assert torch.equal(cut[:, number], pixels[:, :, top : top + size, left : left + size].flatten(1))


@pytest.mark.parametrize(("side", "size"), [(28, 5), (32, 64), (8, 0), (8, -2)])
def test_patches_fill_the_image(side, size):
    with pytest.raises(ValueError, match=f"patch_size={size}: expected a divisor of the size of the image, {side}"):
        images.patches_per_side(side, size)
    with pytest.raises(ValueError, match="expected a divisor"):
        images.patches(torch.zeros(1, 1, side, side), size)


@pytest.mark.parametrize(
    ("grid_size", "central"),
    [(8, (27, 28, 35, 36)), (7, (24,)), (4, (5, 6, 9, 10)), (3, (4,)), (2, (0, 1, 2, 3)), (1, (0,))],
)
def test_focal(grid_size, central):
    assert images.focal_patches(grid_size) == central


def test_focal_of_nothing_is_refused():
    with pytest.raises(ValueError, match="grid_size=0: expected at least 1"):
        images.focal_patches(0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    ("channels", "side", "canvas", "size"), [(3, 8, 16, 4), (1, 6, 10, 2), (2, 4, 4, 2), (1, 4, 12, 4)]
)
def test_clutter(channels, side, canvas, size, dtype):
    batch = 12
    pixels = torch.randint(0, 120, (batch, channels, side, side), generator=seeded(1)).to(dtype)
    others = torch.randint(120, 256, (7, channels, 2 * size, 2 * size), generator=seeded(2)).to(dtype)
    canvases, signal = hidden(pixels, others, canvas, size)
    along, own = canvas // size, side // size
    assert canvases.shape == (batch, channels, canvas, canvas) and canvases.dtype == dtype
    assert signal.shape == (batch, along**2) and signal.dtype == torch.bool
    assert (signal.sum(dim=1) == own**2).all()
    pieces = {tuple(piece.tolist()) for piece in images.patches(others, size).flatten(0, 1)}
    tokens = images.patches(canvases, size)
    for image in range(batch):
        first = int(signal[image].int().argmax())
        top, left = first // along * size, first % along * size
        assert torch.equal(canvases[image, :, top : top + side, left : left + side], pixels[image])
        marked = torch.zeros(along, along, dtype=torch.bool)
        marked[top // size : top // size + own, left // size : left // size + own] = True
        assert torch.equal(signal[image], marked.flatten())
        assert all(tuple(token.tolist()) in pieces for token in tokens[image][~signal[image]])


def test_clutter_draws_every_place_and_every_piece():
    pixels, others = -torch.ones(4000, 1, 4, 4), noise(3, 1, 6, 6)  # a canvas of 4x4 patches, 27 pieces
    canvases, signal = hidden(pixels, others, 8, 2)
    corners = torch.bincount(signal.int().argmax(dim=1), minlength=16).reshape(4, 4)
    assert corners[:3, :3].min() > 0.8 * 4000 / 9 and corners[:3, :3].sum() == 4000
    drawn = images.patches(canvases, 2)[~signal][:, 0]
    values, counts = drawn.unique(return_counts=True)
    assert set(values.tolist()) == set(images.patches(others, 2)[:, :, 0].flatten().tolist())
    assert counts.min() > 0.9 * len(drawn) / 27
    first, second = images.patches(canvases, 2)[:, [0, 15], 0][~signal[:, [0, 15]].any(dim=1)].T
    assert (first == second).float().mean() < 0.1  # of one canvas, drawn one by one


@pytest.mark.parametrize(
    ("side", "canvas", "size", "message"),
    [
        (8, 4, 4, "canvas_size=4: expected at least the size of the image, 8"),
        (8, 18, 4, "patch_size=4: expected a divisor of the size of the image, 18"),
        (6, 16, 4, "patch_size=4: expected a divisor of the size of the image, 6"),
    ],
)
def test_clutter_refuses_sides(side, canvas, size, message):
    with pytest.raises(ValueError, match=message):
        images.clutter(torch.zeros(2, 1, side, side), torch.zeros(2, 1, 8, 8), canvas, size, uniform(2, 2))


@pytest.mark.parametrize("others", [torch.zeros(2, 3, 8, 8), torch.zeros(2, 1, 8, 8, dtype=torch.uint8)])
def test_clutter_refuses_others(others):
    with pytest.raises(ValueError, match=r"others: expected torch\.float32 with 1 channels"):
        images.clutter(torch.zeros(2, 1, 8, 8), others, 16, 4, uniform(2, 34))
