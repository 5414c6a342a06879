//! Any size and any processor: a plan is consistent, and a small picture can be prepared by it.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use paguro_vision::{Budget, Detail, Filter, Processor, Rgb, SizeRule, SmallSides};

#[derive(Arbitrary, Debug)]
struct Input {
    rule: u8,
    first: u64,
    second: u32,
    flag: bool,
    patch: u8,
    merge: u8,
    width: u32,
    height: u32,
    detail: u8,
    min_tokens: Option<u32>,
    max_tokens: Option<u32>,
}

fuzz_target!(|input: Input| {
    let rule = match input.rule % 8 {
        0 => SizeRule::Smart {
            min_pixels: input.first,
            max_pixels: u64::from(input.second),
            small: [SmallSides::Rounded, SmallSides::Truncated, SmallSides::InTurn][usize::from(input.detail / 9 % 3)],
        },
        1 => SizeRule::Square { side: input.second % 4096 },
        2 => SizeRule::Budget { tokens: input.second },
        3 => SizeRule::LongestEdge { pixels: input.second },
        4 => SizeRule::Grid { tile: input.second % 2048, min_tiles: input.first as u32 % 16, max_tiles: input.detail.into() },
        5 => SizeRule::Flexible {
            min_tokens: input.first as u32 % 1024,
            max_tokens: input.second % 1024,
            tolerance: f64::from_bits(input.first),
            tile: input.second % 2048,
            min_tiles: u32::from(input.detail % 4),
            max_tiles: u32::from(input.detail),
        },
        6 => SizeRule::Padded { max_patches: input.second, max_side: input.first as u32 },
        _ => SizeRule::Tiles { longest_edge: input.second, tile: input.first as u32 % 2048, split: input.flag },
    };
    let filter = [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos][usize::from(input.detail % 3)];
    let processor =
        Processor { rule, filter, mean: [0.5; 3], std: [0.5; 3], patch: input.patch.into(), merge: input.merge.into() };
    let detail = [Detail::Auto, Detail::Low, Detail::High][usize::from(input.detail / 3 % 3)];
    let budget = Budget { detail, min_tokens: input.min_tokens, max_tokens: input.max_tokens };
    let Ok(plan) = processor.plan(input.width, input.height, budget) else { return };
    let side = u32::from(input.patch) * u32::from(input.merge);
    for part in &plan.parts {
        assert!(part.rows > 0 && part.columns > 0);
        assert_eq!([part.rows * side, part.columns * side], [part.height, part.width]);
    }
    let pixels: u64 = plan.resizes.iter().map(|&[width, height]| u64::from(width) * u64::from(height)).sum();
    if input.width.max(input.height) < 256 && pixels < 1 << 18 {
        let rgb = vec![input.detail; (input.width * input.height * 3) as usize];
        let prepared = processor.prepare(&Rgb { width: input.width, height: input.height, rgb }, &plan);
        assert_eq!(prepared.rgb.len(), plan.bytes());
        let is_padded = matches!(processor.rule, SizeRule::Padded { .. });
        let stays = |value: u8| value == input.detail || is_padded && value == 0;
        assert!(prepared.rgb.iter().all(|&value| stays(value)), "one colour stays as it is");
    }
});
