#!/usr/bin/env python3
"""make_fixtures.py - writes fixtures/ with Pillow and the image processors of transformers (5.17 or later, with PyTorch for those of
LFM2-VL, GLM-4V, PaddleOCR-VL and Kimi K2.5, of which only sizes are used).

Sizes and pixels come from the same generators as in the Rust tests, so only results are stored.
"""
import gzip
import io
import json
import pathlib
import struct
import types

import numpy as np
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4
from transformers.models.glm4v.image_processing_glm4v import smart_resize as glm4v_resize
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.paddleocr_vl.image_processing_paddleocr_vl import smart_resize as paddle_resize
from transformers.models.pixtral import image_processing_pil_pixtral as pixtral
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen

OUT = pathlib.Path(__file__).parent / "fixtures"
COUNT = 3000


class Random:
    """A linear congruential generator of 64 bits."""

    def __init__(self, seed):
        self.state = seed

    def next(self, bound):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % bound


def sizes():
    """Widths and heights: small, ordinary, large, and square ones, and multiples of common factors with neighbours."""
    random = Random(7)
    for _ in range(COUNT):
        kind = random.next(5)
        if kind == 0:
            yield 1 + random.next(64), 1 + random.next(64)
        elif kind == 1:
            yield 1 + random.next(2000), 1 + random.next(2000)
        elif kind == 2:
            yield 1 + random.next(16384), 1 + random.next(16384)
        elif kind == 3:
            side = 1 + random.next(4096)
            yield side, side
        else:
            factor = [14, 16, 28, 32, 48, 364, 512][random.next(7)]
            yield (max(1, factor * (1 + random.next(40)) // 2 + random.next(3) - 1),
                   max(1, factor * (1 + random.next(40)) // 2 + random.next(3) - 1))


def picture(width, height, seed=1):
    """uint8 [height, width, 3]: noise, so that every tap matters, with black and white ends."""
    random = Random(seed)
    values = [random.next(256) if (i // 97) % 3 else 255 * random.next(2) for i in range(width * height * 3)]
    return np.array(values, np.uint8).reshape(height, width, 3)


def fnv(data):
    value = 0xcbf29ce484222325
    for byte in bytes(data):
        value = ((value ^ byte) * 0x100000001b3) % 2**64
    return f"{value:016x}"


def refused(function, *arguments):
    try:
        return function(*arguments)
    except (ValueError, ZeroDivisionError):
        return 0, 0


class Shape:
    """Stands for the pixels of a picture of which only the size matters."""

    def __init__(self, height, width):
        self.shape = (3, height, width)

    def __getitem__(self, index):
        return self


def tiles(longest_edge, tile):
    processor = Idefics3ImageProcessorPil(size={"longest_edge": longest_edge}, max_image_size={"longest_edge": tile})

    def rows_and_columns(height, width):
        image = processor.resize(Shape(height, width), processor.size, processor.resample)
        image = processor.resize_for_vision_encoder(image, tile, resample=processor.resample)
        return processor.split_images(image, processor.max_image_size, processor.resample)[1:]
    return rows_and_columns


LFM2 = Lfm2VlImageProcessor()


def lfm2(h, w, least=64, most=256, tile=512):
    """(height, width) of the undivided picture or of the whole one behind tiles, (rows, columns) of tiles or zeros."""
    limits = dict(downsample_factor=2, min_image_tokens=least, max_image_tokens=most, encoder_patch_size=16)
    width, height = LFM2.smart_resize(h, w, **limits)
    if width * height // 1024 > most:
        raise ValueError("narrow pictures have more tokens than files permit")
    limits.pop("min_image_tokens")
    if not LFM2._is_image_too_large(h, w, max_pixels_tolerance=2.0, **limits):
        return (height, width), (0, 0)
    columns, rows, *_ = LFM2._get_grid_layout(h, w, 2, 10, tile)
    return (height, width), (rows, columns)


def kimi(h, w, patches=4096):
    return navit_resize(h, w, patch_size=14, merge_kernel_size=2, max_patches=patches, max_size_per_side=512)


def tables():
    """(height, width) of the resized picture for each size; of Idefics3 rows and columns of tiles."""
    def smart(factor, least, most):
        return lambda h, w: qwen.smart_resize(h, w, factor, least, most)

    def budget(tokens, pool=3):
        return lambda h, w: gemma4.get_aspect_ratio_preserving_size(h, w, 16, tokens * pool * pool, pool)

    def edge(longest, factor):
        def size(h, w):
            shape = np.broadcast_to(np.uint8(0), (3, h, w))
            return pixtral.get_resize_output_image_size(shape, (longest, longest), (factor, factor), "channels_first")
        return size
    rules = {
        "qwen3": smart(32, 65536, 16777216), "qwen2": smart(28, 3136, 12845056), "small": smart(32, 9216, 262144),
        "gemma4-70": budget(70), "gemma4-280": budget(280), "gemma4-1120": budget(1120),
        "mistral3": edge(1540, 28), "pixtral": edge(1024, 16),
        "internvl": lambda h, w: got.get_optimal_tiled_canvas((h, w), (448, 448), 1, 12)[::-1],
        "lfm2": lambda h, w: tuple(np.add(*lfm2(h, w))), "kimi": lambda h, w: kimi(h, w)[1],
        "glm4v": lambda h, w: glm4v_resize(2, h, w, 2, 28, 112 * 112, 28 * 28 * 15000),
        "paddleocr": lambda h, w: paddle_resize(h, w, 28, 384 * 384, 1536 * 1536),
        "idefics3": tiles(4 * 364, 364), "smolvlm": tiles(2048, 512), "smolvlm-small": tiles(512, 512)}
    original = PilBackend.resize
    PilBackend.resize = lambda self, image, size, resample=None, **_: Shape(size.height, size.width)
    for name, rule in rules.items():
        data = b"".join(struct.pack("<HH", *refused(rule, h, w)) for w, h in sizes())
        (OUT / f"sizes-{name}.bin.gz").write_bytes(gzip.compress(data, 9, mtime=0))
    PilBackend.resize = original


def resampled():
    """Hashes of Pillow's results for many sizes."""
    filters = {"bilinear": Image.BILINEAR, "bicubic": Image.BICUBIC, "lanczos": Image.LANCZOS}
    cases = [(37, 23, 20, 31), (37, 23, 37, 11), (37, 23, 64, 23), (37, 23, 37, 23), (1, 1, 5, 4), (200, 3, 7, 90), (3, 200, 90, 7),
             (129, 97, 64, 48), (61, 83, 224, 160), (311, 207, 96, 64), (50, 50, 1, 1), (97, 31, 896, 5),
             (61, 140, 112, 112), (30, 47, 18, 23), (30, 48, 18, 23), (30, 47, 19, 23), (12, 12, 34, 16), (40, 60, 41, 59)]
    return [dict(filter=name, from_=[w, h], to=[x, y],
                 hash=fnv(np.asarray(Image.fromarray(picture(w, h)).resize((x, y), which)).tobytes()))
            for name, which in filters.items() for w, h, x, y in cases]


def processed():
    """Hashes of whole pictures through the processors, without normalization."""
    plain = dict(do_rescale=False, do_normalize=False)
    clip = dict(return_tensors=None)
    cases = []
    for w, h in [(100, 75), (61, 140)]:
        image = Image.fromarray(picture(w, h))

        def add(family, pixels):
            cases.append(dict(family=family, from_=[w, h], hash=fnv(np.ascontiguousarray(pixels).astype(np.uint8).tobytes())))
        rows, columns = qwen.smart_resize(h, w, 32, 9216, 262144)
        add("qwen", np.asarray(image.resize((columns, rows), Image.BICUBIC)))
        out = Gemma3ImageProcessorPil(size={"height": 112, "width": 112}, **plain)(image, **clip)["pixel_values"][0]
        add("gemma3", np.transpose(out, (1, 2, 0)))
        rows, columns = gemma4.get_aspect_ratio_preserving_size(h, w, 16, 70 * 9, 3)
        out = gemma4.Gemma4ImageProcessorPil(max_soft_tokens=70, **plain)(image, **clip)["pixel_values"][0]
        patches = np.asarray(out)[:rows * columns // 256].reshape(rows // 16, columns // 16, 16, 16, 3)
        add("gemma4", patches.transpose(0, 2, 1, 3, 4))
        out = pixtral.PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": 28, "width": 28}, **plain)(
            image, **clip)["pixel_values"][0]
        add("pixtral", np.transpose(out, (1, 2, 0)))
        out = Idefics3ImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 64}, **plain)(
            image, **clip)["pixel_values"][0]
        add("idefics3", np.transpose(np.stack(out), (0, 2, 3, 1)))
        out = got.GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, crop_to_patches=True, **plain)(image, **clip)["pixel_values"]
        add("internvl", np.transpose(np.stack(out), (0, 2, 3, 1)))
        (height, width), (rows, columns) = lfm2(h, w, 1, 2, 32)
        whole = np.asarray(image.resize((width, height), Image.BILINEAR)).ravel()
        cut = np.asarray(image.resize((columns * 32, rows * 32), Image.BILINEAR)).reshape(rows, 32, columns, 32, 3)
        add("lfm2", np.concatenate([cut.transpose(0, 2, 1, 3, 4).ravel(), whole]))
        (height, width), (padded_height, padded_width) = kimi(h, w, 24)
        out = np.zeros((padded_height, padded_width, 3), np.uint8)
        out[:height, :width] = np.asarray(image.resize((width, height), Image.BICUBIC))
        add("kimi", out)
    return cases


def prompts():
    """Texts in place of pictures, as the processors write them without a tokenizer."""
    intern = types.SimpleNamespace(start_image_token="<img>", image_token="<IMG_CONTEXT>", end_image_token="</img>", image_seq_length=4)
    lfm = types.SimpleNamespace(image_token="<image>", image_start_token="<|image_start|>", image_end_token="<|image_end|>",
                                image_thumbnail_token="<|img_thumbnail|>")
    cases = []
    for w, h in [(100, 75), (61, 140), (20, 20)]:
        columns, rows = got.get_optimal_tiled_canvas((h, w), (56, 56), 1, 12)
        tiles = rows * columns + (rows * columns > 1)
        text = InternVLProcessor.replace_image_token(intern, dict(num_patches=[tiles], image_num_patches=[tiles]), 0)
        cases.append(dict(family="internvl", from_=[w, h], text=text))
        (height, width), (rows, columns) = lfm2(h, w, 1, 2, 32)
        text = Lfm2VlProcessor._build_image_tokens(lfm, rows, columns, 1, width * height // 1024, True, True)
        cases.append(dict(family="lfm2", from_=[w, h], text=text))
    return cases


def files():
    """Small files in every format and form, with their pixels over white as Pillow shows them."""
    rgb = picture(11, 7, 3)
    alpha = picture(11, 7, 4)[:, :, 0]
    rgba = np.dstack([rgb, alpha])
    palette = Image.fromarray(rgb).quantize(13)
    white = lambda image: Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    expected = {}

    def add(name, image, shown=None, **options):
        buffer = io.BytesIO()
        image.save(buffer, **options)
        (OUT / name).write_bytes(buffer.getvalue())
        if shown is None:
            shown = white(Image.open(io.BytesIO(buffer.getvalue())))
        expected[name] = dict(size=list(shown.size), pixels=np.asarray(shown.convert("RGB")).tobytes().hex())

    add("rgb.png", Image.fromarray(rgb), format="PNG")
    add("rgba.png", Image.fromarray(rgba), format="PNG")
    add("grey.png", Image.fromarray(alpha), format="PNG")
    add("grey-alpha.png", Image.fromarray(np.dstack([alpha, rgb[:, :, 1]]), "LA"), format="PNG")
    add("bits.png", Image.fromarray(alpha).convert("1"), format="PNG")
    add("palette.png", palette, format="PNG")
    add("palette-4.png", Image.fromarray(rgb).quantize(4), format="PNG", bits=2)
    add("palette-transparent.png", palette, format="PNG", transparency=3)
    add("key-transparent.png", Image.fromarray(rgb), format="PNG", transparency=tuple(int(x) for x in rgb[2, 3]))
    exif = Image.Exif()
    exif[0x112] = 6
    add("turned.png", Image.fromarray(rgb), Image.fromarray(np.rot90(rgb, -1)), format="PNG", exif=exif)
    add("lossless.webp", Image.fromarray(rgb), format="WEBP", lossless=True)
    add("alpha.webp", Image.fromarray(rgba), format="WEBP", lossless=True, exact=True)
    add("turned.webp", Image.fromarray(rgb), Image.fromarray(np.rot90(rgb, -1)), format="WEBP", lossless=True, exif=exif)
    add("animated.webp", Image.fromarray(rgb), format="WEBP", lossless=True, save_all=True, append_images=[Image.fromarray(255 - rgb)])
    add("palette.gif", palette, format="GIF")
    add("transparent.gif", palette, format="GIF", transparency=2)
    add("animated.gif", palette, format="GIF", save_all=True, append_images=[Image.fromarray(255 - rgb).quantize(9)])
    add("animated.png", Image.fromarray(rgb), format="PNG", save_all=True, append_images=[Image.fromarray(255 - rgb)])
    smooth = np.mgrid[0:48, 0:64].transpose(1, 2, 0)
    smooth = np.dstack([smooth[:, :, 0] * 5, smooth[:, :, 1] * 3, 255 - smooth[:, :, 0] * 2]).astype(np.uint8)
    smooth = Image.fromarray(smooth)
    add("plain.jpg", smooth, format="JPEG", quality=95)
    add("progressive.jpg", smooth, format="JPEG", quality=90, progressive=True)
    add("grey.jpg", smooth.convert("L"), format="JPEG", quality=95)
    add("cmyk.jpg", smooth.convert("CMYK"), format="JPEG", quality=95)
    buffer = io.BytesIO()
    smooth.save(buffer, format="JPEG", quality=95)
    turned = Image.open(buffer).convert("RGB").transpose(Image.Transpose.ROTATE_270)
    add("turned.jpg", smooth, turned, format="JPEG", quality=95, exif=exif)
    add("lossy.webp", smooth, format="WEBP", quality=95)
    # Two bytes for each sample, written by hand: Pillow does not write RGB of 16 bits.
    import zlib
    deep = np.dstack([rgb, picture(11, 7, 9)])[:, :, [0, 3, 1, 4, 2, 5]]
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    data = b"".join(b"\0" + row.tobytes() for row in deep)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 11, 7, 16, 2, 0, 0, 0))
    (OUT / "rgb-16.png").write_bytes(png + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b""))
    shown = Image.open(OUT / "rgb-16.png").convert("RGB")
    expected["rgb-16.png"] = dict(size=[11, 7], pixels=np.asarray(shown).tobytes().hex())
    return expected


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    tables()
    text = json.dumps(dict(resampled=resampled(), processed=processed(), prompts=prompts(), files=files()), separators=(",", ":"))
    (OUT / "expected.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
