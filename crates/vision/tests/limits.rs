//! Hostile pictures and sizes.

use paguro_vision::{
    Base64Error, Budget, Detail, Filter, Format, Limits, PictureError, Processor, SizeRule, SmallSides,
    decode, from_base64, from_data_url, probe,
};
use proptest::prelude::*;

fn checksum(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
        }
    }
    !crc
}

/// A PNG file with this header and no pixels.
fn png(width: u32, height: u32) -> Vec<u8> {
    let mut chunk = b"IHDR".to_vec();
    chunk.extend(width.to_be_bytes());
    chunk.extend(height.to_be_bytes());
    chunk.extend([8, 6, 0, 0, 0]);
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0d".to_vec();
    file.extend(&chunk);
    file.extend(checksum(&chunk).to_be_bytes());
    file.extend(b"\0\0\0\0IDAT");
    file.extend(checksum(b"IDAT").to_be_bytes());
    file
}

fn gif(width: u16, height: u16, frame: [u16; 4]) -> Vec<u8> {
    let mut file = b"GIF89a".to_vec();
    file.extend(width.to_le_bytes());
    file.extend(height.to_le_bytes());
    file.extend([0x80, 0, 0, 0, 0, 0, 255, 255, 255, b',']);
    frame.iter().for_each(|number| file.extend(number.to_le_bytes()));
    file.extend([0, 2, 2, 0x44, 1, 0, b';']);
    file
}

fn webp(width: u32, height: u32) -> Vec<u8> {
    let mut file = b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0".to_vec();
    file.extend(&(width - 1).to_le_bytes()[..3]);
    file.extend(&(height - 1).to_le_bytes()[..3]);
    file.extend(b"VP8L\0\0\0\0");
    file
}

fn jpeg(width: u16, height: u16) -> Vec<u8> {
    let mut file = b"\xff\xd8\xff\xc0\0\x11\x08".to_vec();
    file.extend(height.to_be_bytes());
    file.extend(width.to_be_bytes());
    file.extend(b"\x03\x01\x22\0\x02\x11\0\x03\x11\0\xff\xda\0\x0c\x03\x01\0\x02\0\x03\0\0\x3f\0\xff\xd9");
    file
}

#[test]
fn bombs_are_refused_by_their_headers() {
    for (name, file) in [
        ("png", png(0x7fff_ffff, 0x7fff_ffff)),
        ("png side", png(20_000, 1)),
        ("png pixels", png(16_000, 16_000)),
        ("gif", gif(65_535, 65_535, [0, 0, 65_535, 65_535])),
        ("jpeg", jpeg(65_500, 65_500)),
        ("webp", webp(16_000, 16_000)),
    ] {
        for error in [
            probe(&file, &Limits::default()).err().unwrap(),
            decode(&file, &Limits::default()).err().unwrap(),
        ] {
            assert!(matches!(error, PictureError::TooManyPixels { .. }), "{name}: {error}");
            assert!(error.to_string().contains("16384 on a side"), "{error}");
        }
    }
    // The canvas is small, the frame is not.
    let file = gif(4, 4, [0, 0, 65_535, 65_535]);
    assert!(matches!(decode(&file, &Limits::default()), Err(PictureError::Damaged { .. })));
    let file = vec![0xff; (20 << 20) + 1];
    assert_eq!(probe(&file, &Limits::default()).err(), Some(PictureError::NotAPicture));
    let mut file = png(1, 1);
    file.resize((20 << 20) + 1, 0);
    assert!(matches!(probe(&file, &Limits::default()), Err(PictureError::TooManyBytes { .. })));
}

#[test]
fn other_formats_are_refused_by_name() {
    for (bytes, name) in [
        (&b"\0\0\0\x20ftypheic\0\0"[..], "HEIC"),
        (b"\0\0\0\x20ftypavif\0\0", "AVIF"),
        (b"\0\0\0\x20ftypisom\0\0", "MP4 video"),
        (b"II*\0rest", "TIFF"),
        (b"%PDF-1.7", "PDF"),
        (b"<?xml version='1.0'?>\n<svg xmlns='...'/>", "SVG"),
        (b"  <SVG>", "SVG"),
        (b"\xff\x0a..", "JPEG XL"),
        (b"BM....", "BMP"),
    ] {
        assert_eq!(Format::of(bytes), Err(PictureError::Unsupported(name)));
    }
    for bytes in [&b"<html><svg>"[..], b"hello", b"\x7fELF", b"RIFF....WAVE"] {
        assert_eq!(Format::of(bytes), Err(PictureError::NotAPicture));
    }
    assert_eq!(Format::of(b""), Err(PictureError::Empty));
}

#[test]
fn data_urls_are_read_in_all_spellings() {
    for text in [
        "data:image/png;base64,AQID/w==",
        "DATA:;BASE64,AQID/w",
        "data:text/plain;charset=utf-8;base64,AQID_w==",
        "data:image/png;base64,AQID%2Fw%3D%3D",
        "data:image/png;base64, AQ\r\nID/w==\n",
    ] {
        assert_eq!(from_data_url(text, 100), Ok(vec![1, 2, 3, 255]), "{text}");
    }
    for text in
        ["data:image/png,abc", "http://a/b", "", "data:", "data:image/png;base64", "dat\u{e4}:;base64,"]
    {
        assert_eq!(from_data_url(text, 100), Err(Base64Error::NotBase64), "{text}");
    }
    for text in ["data:;base64,A", "data:;base64,A*==", "data:;base64,AQ=ID"] {
        assert!(matches!(from_data_url(text, 100), Err(Base64Error::Invalid(_))), "{text}");
    }
    assert!(matches!(
        from_base64(&"A".repeat(1 << 20), 1000),
        Err(Base64Error::TooLarge { limit: 1000, .. })
    ));
    assert!(matches!(from_base64(&"AAAA".repeat(334), 1000), Err(Base64Error::TooLarge { bytes: 1002, .. })));
}

fn small() -> impl Strategy<Value = SmallSides> {
    prop_oneof![Just(SmallSides::Rounded), Just(SmallSides::Truncated), Just(SmallSides::InTurn)]
}

fn rules() -> impl Strategy<Value = Processor> {
    let rule =
        prop_oneof![
            (any::<u64>(), any::<u64>(), small()).prop_map(|(a, b, small)| SizeRule::Smart {
                min_pixels: a,
                max_pixels: b,
                small
            }),
            (0..1u64 << 24, 0..1u64 << 26, small()).prop_map(|(a, b, small)| SizeRule::Smart {
                min_pixels: a,
                max_pixels: b,
                small
            }),
            (0..5000u32).prop_map(|side| SizeRule::Square { side }),
            (0..3000u32).prop_map(|tokens| SizeRule::Budget { tokens }),
            any::<u32>().prop_map(|pixels| SizeRule::LongestEdge { pixels }),
            (any::<u32>(), 0..1200u32, any::<bool>())
                .prop_map(|(longest_edge, tile, split)| SizeRule::Tiles { longest_edge, tile, split }),
            (0..1200u32, 0..14u32, 0..14u32).prop_map(|(tile, min_tiles, max_tiles)| SizeRule::Grid {
                tile,
                min_tiles,
                max_tiles
            }),
            (0..400u32, 0..400u32, any::<f64>(), 0..1200u32, (0..4u32, 0..14u32)).prop_map(
                |(min_tokens, max_tokens, tolerance, tile, (min_tiles, max_tiles))| {
                    SizeRule::Flexible { min_tokens, max_tokens, tolerance, tile, min_tiles, max_tiles }
                }
            ),
            (any::<u32>(), any::<u32>())
                .prop_map(|(max_patches, max_side)| SizeRule::Padded { max_patches, max_side }),
            (0..20_000u32, 0..600u32)
                .prop_map(|(max_patches, max_side)| SizeRule::Padded { max_patches, max_side }),
        ];
    (rule, 0..40u32, 0..6u32).prop_map(|(rule, patch, merge)| Processor {
        rule,
        filter: Filter::Bicubic,
        mean: [0.5; 3],
        std: [0.5; 3],
        patch,
        merge,
    })
}

proptest! {
    #[test]
    fn plans_of_any_size_are_consistent(
        processor in rules(),
        sides in prop_oneof![(any::<u32>(), any::<u32>()), (1..2000u32, 1..2000u32), (1..16_385u32, 1..16_385u32)],
        detail in prop_oneof![Just(Detail::Auto), Just(Detail::Low), Just(Detail::High)],
        min_tokens in proptest::option::of(any::<u32>()),
        max_tokens in proptest::option::of(1..5000u32),
    ) {
        let budget = Budget { detail, min_tokens, max_tokens };
        let Ok(plan) = processor.plan(sides.0, sides.1, budget) else { return Ok(()) };
        let factor = processor.patch * processor.merge;
        prop_assert!(!plan.parts.is_empty() && !plan.resizes.is_empty());
        for part in &plan.parts {
            prop_assert!(part.rows > 0 && part.columns > 0);
            prop_assert_eq!([part.rows * factor, part.columns * factor], [part.height, part.width]);
        }
        let last = plan.resizes[plan.resizes.len() - 1];
        match plan.tiles {
            Some(grid) => {
                let tile = plan.parts[0];
                prop_assert_eq!([grid.columns * tile.width, grid.rows * tile.height], last);
                prop_assert_eq!(plan.parts.len() as u32, grid.rows * grid.columns + 1);
            }
            None => {
                let [width, height] = [plan.parts[0].width, plan.parts[0].height];
                let is_padded = matches!(processor.rule, SizeRule::Padded { .. });
                let borders = [width.wrapping_sub(last[0]), height.wrapping_sub(last[1])];
                prop_assert!(borders.iter().all(|border| *border == 0 || is_padded && *border < factor));
            }
        }
        if let (SizeRule::Smart { .. } | SizeRule::Padded { .. }, Some(most)) = (&processor.rule, max_tokens) {
            prop_assert!(plan.tokens() <= most as usize, "{} of {most}: {plan:?}", plan.tokens());
        }
    }

    #[test]
    fn any_bytes_are_read_within_limits(
        start in proptest::sample::select(vec![png(9, 7), gif(9, 7, [1, 1, 4, 4]), webp(9, 7), jpeg(9, 7)]),
        change in proptest::collection::vec((any::<u16>(), any::<u8>()), 0..6),
        more in proptest::collection::vec(any::<u8>(), 0..64),
    ) {
        let mut bytes = start;
        bytes.extend(more);
        for (at, value) in change {
            let at = usize::from(at) % bytes.len();
            bytes[at] = value;
        }
        let limits = Limits { bytes: 1 << 20, pixels: 1 << 16, side: 1 << 10 };
        if let Ok(header) = probe(&bytes, &limits) {
            prop_assert!(u64::from(header.width) * u64::from(header.height) <= limits.pixels);
        }
        if let Ok(picture) = decode(&bytes, &limits) {
            prop_assert_eq!(picture.rgb.len(), (picture.width * picture.height * 3) as usize);
        }
    }
}

/// Found by fuzzing: the decoder of rows panicked.
#[test]
fn a_palette_that_ends_within_a_colour_is_refused() {
    let part = |name: &[u8], body: &[u8]| {
        let named = [name, body].concat();
        [&(body.len() as u32).to_be_bytes()[..], &named, &checksum(&named).to_be_bytes()].concat()
    };
    let file = |palette: &[u8]| {
        let header = [&[0, 0, 0, 1, 0, 0, 0, 1][..], &[8, 3, 0, 0, 0]].concat();
        // One row of index 0, stored without compression.
        let rows = [0x78, 1, 1, 2, 0, 0xfd, 0xff, 0, 0, 0, 2, 0, 1];
        let parts = [
            (&b"IHDR"[..], &header[..]),
            (b"PLTE", palette),
            (b"tRNS", &[255]),
            (b"IDAT", &rows),
            (b"IEND", b""),
        ];
        parts
            .iter()
            .fold(b"\x89PNG\r\n\x1a\n".to_vec(), |file, (name, body)| [file, part(name, body)].concat())
    };
    assert!(decode(&file(&[1, 2, 3, 4, 5, 6]), &Limits::default()).is_ok());
    for length in [1, 2, 4, 5, 55] {
        let refused = decode(&file(&vec![7; length]), &Limits::default());
        assert!(matches!(refused, Err(PictureError::Damaged { .. })), "{length}: {refused:?}");
    }
}

/// Found by fuzzing: sides of tokens were not those of pixels.
#[test]
fn budgets_without_a_size_are_refused() {
    let plan = |tokens: u32| {
        let rule = SizeRule::Budget { tokens };
        let (mean, std) = ([0.5; 3], [0.5; 3]);
        let processor = Processor { rule, filter: Filter::Bicubic, mean, std, patch: 41, merge: 14 };
        processor.plan(2304, 3584, Budget::default()).map(|plan| plan.parts[0])
    };
    let part = plan(65_536).unwrap();
    assert_eq!([part.width, part.height], [part.columns, part.rows].map(|side| side * 41 * 14));
    assert!(plan(65_537).is_err() && plan(u32::MAX).is_err());
}
