//! Any size and any processor: a plan is consistent, and a small picture can be prepared by it.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use paguro_vision::{Budget, Detail, Filter, Processor, Rgb, SizeRule};

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
    let rule = match input.rule % 5 {
        0 => SizeRule::Smart { min_pixels: input.first, max_pixels: u64::from(input.second) },
        1 => SizeRule::Square { side: input.second % 4096 },
        2 => SizeRule::Budget { tokens: input.second },
        3 => SizeRule::LongestEdge { pixels: input.second },
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
        assert!(prepared.rgb.iter().all(|&value| value == input.detail), "one colour stays as it is");
    }
});
