//! Sizes, pixels and files against results of transformers and Pillow (`make_fixtures.py`).

use std::{collections::BTreeMap, io::Read as _, path::PathBuf};

use flate2::read::GzDecoder;
use paguro_vision::{
    Budget, Detail, Family, Filter, Format, Limits, Piece, Plan, Processor, Rgb, SizeRule, SmallSides,
    decode, probe, resample,
};
use serde_json::Value;

fn fixture(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn unzipped(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    GzDecoder::new(fixture(name).as_slice()).read_to_end(&mut bytes).unwrap();
    bytes
}

fn expected(part: &str) -> Value {
    serde_json::from_slice::<Value>(&unzipped("expected.json.gz")).unwrap()[part].take()
}

/// The generator of the script.
struct Random(u64);

impl Random {
    fn next(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

fn sizes() -> Vec<[u32; 2]> {
    let mut random = Random(7);
    let size = |random: &mut Random| match random.next(5) {
        0 => [1 + random.next(64), 1 + random.next(64)],
        1 => [1 + random.next(2000), 1 + random.next(2000)],
        2 => [1 + random.next(16384), 1 + random.next(16384)],
        3 => [1 + random.next(4096); 2],
        _ => {
            let factor = [14, 16, 28, 32, 48, 364, 512][random.next(7) as usize];
            let mut side = || {
                let base = factor * (1 + random.next(40)) / 2 + random.next(3);
                base.saturating_sub(1).max(1)
            };
            [side(), side()]
        }
    };
    (0..3000).map(|_| size(&mut random).map(|side| side as u32)).collect()
}

fn picture(width: u32, height: u32, seed: u64) -> Rgb {
    let mut random = Random(seed);
    let value = |i: u32| if (i / 97).is_multiple_of(3) { 255 * random.next(2) } else { random.next(256) };
    Rgb { width, height, rgb: (0..width * height * 3).map(value).map(|value| value as u8).collect() }
}

fn fnv(bytes: &[u8]) -> String {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

fn processor(rule: SizeRule, patch: u32, merge: u32) -> Processor {
    let filter = match rule {
        SizeRule::Square { .. } => Filter::Bilinear,
        SizeRule::Tiles { .. } => Filter::Lanczos,
        _ => Filter::Bicubic,
    };
    Processor { rule, filter, mean: [0.5; 3], std: [0.5; 3], patch, merge }
}

fn lfm2(min_tokens: u32, max_tokens: u32, tile: u32) -> Processor {
    let (tolerance, min_tiles, max_tiles) = (2.0, 2, 10);
    let rule = SizeRule::Flexible { min_tokens, max_tokens, tolerance, tile, min_tiles, max_tiles };
    Processor { filter: Filter::Bilinear, ..processor(rule, 16, 2) }
}

fn small_internvl() -> Processor {
    processor(SizeRule::Grid { tile: 56, min_tiles: 1, max_tiles: 12 }, 14, 2)
}

/// The published image processors whose sizes the script has written.
fn published() -> BTreeMap<&'static str, Processor> {
    let enlarged = |min_pixels, max_pixels, patch, small| {
        processor(SizeRule::Smart { min_pixels, max_pixels, small }, patch, 2)
    };
    let smart = |min_pixels, max_pixels, patch| enlarged(min_pixels, max_pixels, patch, SmallSides::Rounded);
    let budget = |tokens| processor(SizeRule::Budget { tokens }, 16, 3);
    let edge = |pixels, patch, merge| processor(SizeRule::LongestEdge { pixels }, patch, merge);
    let tiles = |longest_edge, tile, patch, merge| {
        processor(SizeRule::Tiles { longest_edge, tile, split: true }, patch, merge)
    };
    BTreeMap::from([
        ("qwen3", smart(65_536, 16_777_216, 16)),
        ("qwen2", smart(3_136, 12_845_056, 14)),
        ("small", smart(9_216, 262_144, 16)),
        ("gemma4-70", budget(70)),
        ("gemma4-280", budget(280)),
        ("gemma4-1120", budget(1120)),
        ("mistral3", edge(1540, 14, 2)),
        ("pixtral", edge(1024, 16, 1)),
        ("idefics3", tiles(4 * 364, 364, 14, 2)),
        ("smolvlm", tiles(2048, 512, 16, 4)),
        ("smolvlm-small", tiles(512, 512, 16, 4)),
        ("internvl", processor(SizeRule::Grid { tile: 448, min_tiles: 1, max_tiles: 12 }, 14, 2)),
        ("lfm2", lfm2(64, 256, 512)),
        // Its limits count both frames.
        ("glm4v", enlarged(6_272, 5_880_000, 14, SmallSides::Truncated)),
        ("paddleocr", enlarged(147_456, 2_359_296, 14, SmallSides::InTurn)),
        ("kimi", processor(SizeRule::Padded { max_patches: 4096, max_side: 512 }, 14, 2)),
    ])
}

#[test]
fn sizes_and_tiles_equal_those_of_transformers() {
    let sizes = sizes();
    for (name, processor) in published() {
        let table = unzipped(&format!("sizes-{name}.bin.gz"));
        let table: Vec<[u32; 2]> = table
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&[a, b, c, d]| [u16::from_le_bytes([a, b]).into(), u16::from_le_bytes([c, d]).into()])
            .collect();
        assert_eq!(table.len(), sizes.len(), "{name}");
        // The models' own limits. Gemma 4 has a budget for each level of detail.
        let detail = if name.starts_with("gemma4") { Detail::Auto } else { Detail::High };
        let budget = Budget { detail, ..Budget::default() };
        for (&[width, height], &[rows, columns]) in sizes.iter().zip(&table) {
            // A side of 0 fails later there.
            let (rows, columns) = if rows * columns == 0 { (0, 0) } else { (rows, columns) };
            let plan = processor.plan(width, height, budget);
            let found = match (&plan, &processor.rule) {
                (Err(_), _) => [0, 0],
                (Ok(plan), SizeRule::Tiles { .. }) => {
                    plan.tiles.map_or([0, 0], |grid| [grid.rows, grid.columns])
                }
                (Ok(plan), SizeRule::Grid { .. }) => {
                    plan.tiles.map_or([1, 1], |grid| [grid.rows, grid.columns])
                }
                (Ok(Plan { tiles: Some(grid), parts, .. }), _) => {
                    let whole = parts[parts.len() - 1];
                    [whole.height + grid.rows, whole.width + grid.columns]
                }
                (Ok(plan), _) => [plan.parts[0].height, plan.parts[0].width],
            };
            assert_eq!(found, [rows, columns], "{name}: {width}×{height}: {plan:?}");
        }
    }
}

#[test]
fn resampled_pixels_equal_those_of_pillow() {
    let cases = expected("resampled");
    let cases = cases.as_array().unwrap();
    assert!(cases.len() >= 54);
    for case in cases {
        let filter = match case["filter"].as_str().unwrap() {
            "bilinear" => Filter::Bilinear,
            "bicubic" => Filter::Bicubic,
            "lanczos" => Filter::Lanczos,
            other => panic!("{other}"),
        };
        let side = |name: &str, axis: usize| case[name][axis].as_u64().unwrap() as u32;
        let from = picture(side("from_", 0), side("from_", 1), 1);
        let resized = resample(&from, side("to", 0), side("to", 1), filter);
        assert_eq!(fnv(&resized.rgb), case["hash"], "{case}");
    }
}

#[test]
fn whole_pictures_equal_those_of_the_processors() {
    let cases = expected("processed");
    for case in cases.as_array().unwrap() {
        let family = case["family"].as_str().unwrap();
        let processor = match family {
            "qwen" => {
                let small = SmallSides::Rounded;
                processor(SizeRule::Smart { min_pixels: 9_216, max_pixels: 262_144, small }, 16, 2)
            }
            "gemma3" => processor(SizeRule::Square { side: 112 }, 14, 4),
            "gemma4" => processor(SizeRule::Budget { tokens: 70 }, 16, 3),
            "pixtral" => processor(SizeRule::LongestEdge { pixels: 96 }, 14, 2),
            "idefics3" => processor(SizeRule::Tiles { longest_edge: 128, tile: 64, split: true }, 16, 2),
            "internvl" => small_internvl(),
            "lfm2" => lfm2(1, 2, 32),
            "kimi" => processor(SizeRule::Padded { max_patches: 24, max_side: 512 }, 14, 2),
            other => panic!("{other}"),
        };
        let side = |axis: usize| case["from_"][axis].as_u64().unwrap() as u32;
        let plan = processor.plan(side(0), side(1), Budget::default()).unwrap();
        let pixels = processor.prepare(&picture(side(0), side(1), 1), &plan);
        assert_eq!(pixels.rgb.len(), plan.bytes(), "{family}");
        assert_eq!(fnv(&pixels.rgb), case["hash"], "{case}");
    }
}

#[test]
fn texts_in_place_of_pictures_equal_those_of_the_processors() {
    let cases = expected("prompts");
    for case in cases.as_array().unwrap() {
        let (family, processor, token) = match case["family"].as_str().unwrap() {
            "internvl" => (Family::InternVl, small_internvl(), "<IMG_CONTEXT>"),
            "lfm2" => (Family::Lfm2, lfm2(1, 2, 32), "<image>"),
            other => panic!("{other}"),
        };
        let side = |axis: usize| case["from_"][axis].as_u64().unwrap() as u32;
        let plan = processor.plan(side(0), side(1), Budget::default()).unwrap();
        let written = |piece: Piece| match piece {
            Piece::Text(text) => text,
            Piece::Image(count) => token.repeat(count),
        };
        let text: String = family.expansion(&plan).into_iter().map(written).collect();
        assert_eq!(text, case["text"].as_str().unwrap(), "{case}");
    }
}

#[test]
fn decoded_files_equal_those_of_pillow() {
    let files = expected("files");
    let files = files.as_object().unwrap();
    let mut formats = Vec::new();
    for (name, file) in files {
        let bytes = fixture(name);
        let header = probe(&bytes, &Limits::default()).unwrap_or_else(|error| panic!("{name} {error}"));
        let decoded = decode(&bytes, &Limits::default()).unwrap_or_else(|error| panic!("{name} {error}"));
        formats.push(header.format);
        let size = [0, 1].map(|axis| file["size"][axis].as_u64().unwrap() as u32);
        assert_eq!([header.width, header.height], size, "{name}");
        assert_eq!([decoded.width, decoded.height], size, "{name}");
        let pixels = file["pixels"].as_str().unwrap();
        let pixels: Vec<u8> = (0..pixels.len() / 2)
            .map(|at| u8::from_str_radix(&pixels[at * 2..at * 2 + 2], 16).unwrap())
            .collect();
        // Decoders of lossy formats differ by some levels.
        let most = if name.ends_with(".jpg") || name.starts_with("lossy") { 6 } else { 0 };
        let differs = pixels.iter().zip(&decoded.rgb).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
        assert!(differs <= most && pixels.len() == decoded.rgb.len(), "{name}: {differs}");
    }
    for format in [Format::Png, Format::Jpeg, Format::Webp, Format::Gif] {
        assert!(formats.contains(&format), "{format:?}");
    }
}
