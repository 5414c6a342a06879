//! Images: the time from a file to the first token, and its parts.

use std::{
    fmt::{self, Display, Formatter},
    str::FromStr,
    sync::Arc,
    time::{Duration, Instant},
};

use paguro_engine::{DraftOptions, EncoderTimes, Handle, Picture, Request};
use paguro_model::Model;
use paguro_server::Sight;
use paguro_vision::{Budget, Limits, Plan, decode};
use serde_json::{Value, json};

use super::{
    measure::{Random, Timeline},
    report::{Subject, median},
};
use crate::{
    failure::{Failure, Outcome},
    run::images,
};

/// Width and height of an image in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSize {
    /// Pixels of a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

impl FromStr for ImageSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sides = text.split_once(['x', 'X', '×']);
        let side = |text: &str| text.parse().ok().filter(|side| (1..=Limits::default().side).contains(side));
        let sides = sides.and_then(|(width, height)| Some((side(width)?, side(height)?)));
        let (width, height) =
            sides.ok_or_else(|| "must be a width and a height in pixels, such as 1024x768".to_owned())?;
        Ok(Self { width, height })
    }
}

impl Display for ImageSize {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}

/// An image size, planned for a model.
pub struct ImageCase {
    /// Its size.
    pub size: ImageSize,
    sight: Sight,
    plan: Plan,
}

impl ImageCase {
    /// Plans images of these sizes.
    ///
    /// # Errors
    /// The model reads text only, or does not support a size.
    pub fn all(sizes: &[ImageSize], model: &Model) -> Outcome<Vec<Self>> {
        if sizes.is_empty() {
            return Ok(Vec::new());
        }
        images::check(model, &model.name)?;
        let sight = Sight::of(model).ok_or_else(|| Failure::new("the model reads text only"))?;
        let of_size = |&size: &ImageSize| {
            let plan = sight.processor.plan(size.width, size.height, Budget::default());
            let plan = plan.map_err(|error| Failure::usage(format!("--image {size}: {error}")))?;
            Ok(Self { size, sight: sight.clone(), plan })
        };
        sizes.iter().map(of_size).collect()
    }

    /// Returns the tokens of all parts.
    pub fn tokens(&self) -> usize {
        self.plan.parts.iter().map(paguro_vision::Part::tokens).sum()
    }

    /// Returns the tokens of the largest part.
    pub fn largest_part(&self) -> usize {
        self.plan.parts.iter().map(paguro_vision::Part::tokens).max().unwrap_or(0)
    }

    /// Returns the length of a request: a token before the image, one after it, and one that is generated.
    pub fn context(&self) -> usize {
        self.tokens() + 3
    }
}

/// Times of one image.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ImageTimes {
    /// Decoding and resizing of the file.
    decode: Duration,
    /// Patches, the tower's steps, and reading of its rows.
    tower: EncoderTimes,
    /// From the decoded image to the first token, without the tower.
    prompt: Duration,
}

/// Names of the parts of [`ImageTimes`], in order.
pub const PARTS: [&str; 6] = ["decode", "patches", "tower", "rows", "prompt", "total"];

impl ImageTimes {
    /// Returns the milliseconds of [`PARTS`].
    fn milliseconds(self) -> [f64; PARTS.len()] {
        let Self { decode, tower: EncoderTimes { patches, steps, rows }, prompt } = self;
        let all = decode + patches + steps + rows + prompt;
        [decode, patches, steps, rows, prompt, all].map(|time| time.as_secs_f64() * 1e3)
    }
}

/// Measures an image that no cache contains, with a request of its own.
///
/// # Errors
/// The engine refuses or fails.
pub fn measure(handle: &Handle, case: &ImageCase, random: &mut Random) -> Outcome<ImageTimes> {
    let ImageCase { size, sight, plan } = case;
    let file = png(*size, random)?;
    let ends = random.tokens(2);
    let start = Instant::now();
    let limits = Limits { bytes: usize::MAX, ..Limits::default() };
    let picture = decode(&file, &limits).map_err(|error| Failure::new(format!("the image {error}")))?;
    let pixels = sight.processor.prepare(&picture, plan);
    let decoded = start.elapsed();
    let (mut prompt, mut rows) = (vec![ends[0]], Vec::new());
    for part in &plan.parts {
        rows.push(prompt.len()..prompt.len() + part.tokens());
        prompt.resize(prompt.len() + part.tokens(), sight.image_token);
    }
    prompt.push(ends[1]);
    let grid = plan.parts.first().map_or([0; 2], |part| [part.rows, part.columns]);
    let picture = Picture { key: sight.key(&file, plan), rows, grid, pixels: Arc::new(Arc::new(pixels)) };
    let request = Request {
        max_tokens: Some(1),
        ignore_stop_tokens: true,
        drafts: DraftOptions::off(),
        pictures: vec![picture],
        ..Request::new(prompt)
    };
    let before = handle.stats().encoder_times;
    let start = Instant::now();
    let generation = handle.generate(request).map_err(|error| Failure::from_error(&error))?;
    let first = Timeline::of(generation)?.tokens.first().copied();
    let first = first.ok_or_else(|| Failure::new("a measured request ended without a token"))?;
    let after = handle.stats().encoder_times;
    let tower = EncoderTimes {
        patches: after.patches - before.patches,
        steps: after.steps - before.steps,
        rows: after.rows - before.rows,
    };
    let EncoderTimes { patches, steps, rows } = tower;
    let prompt = first.duration_since(start).saturating_sub(patches + steps + rows);
    Ok(ImageTimes { decode: decoded, tower, prompt })
}

/// Returns a file of random pixels around a gradient, which compresses about as a photograph does.
fn png(size: ImageSize, random: &mut Random) -> Outcome<Vec<u8>> {
    let ImageSize { width, height } = size;
    let mut pixels = Vec::with_capacity(3 * width as usize * height as usize);
    for y in 0..height {
        for x in 0..width {
            let noise = random.next();
            let gradient = [255 * x / width, 255 * y / height, 255 * (x + y) / (width + height)];
            pixels.extend(
                (0..).zip(gradient).map(|(channel, at)| (at as u8) ^ (noise >> (8 * channel) & 15) as u8),
            );
        }
    }
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_compression(png::Compression::Fast);
    let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&pixels));
    written.map_err(|error| Failure::new(format!("an image cannot be made: {error}")))?;
    Ok(file)
}

/// The samples of one image size on one engine.
#[derive(Clone, Debug)]
pub struct ImageRow {
    /// The measured engine.
    pub subject: Subject,
    /// Size of the images.
    pub size: ImageSize,
    /// Tokens of an image.
    pub tokens: usize,
    /// Samples in order.
    pub samples: Vec<ImageTimes>,
}

impl ImageRow {
    /// Returns the milliseconds of a part in all samples.
    fn of_part(&self, part: usize) -> Vec<f64> {
        self.samples.iter().map(|times| times.milliseconds()[part]).collect()
    }

    /// Returns the object of `--json`.
    pub fn json(&self) -> Value {
        let mut object = self.subject.json();
        object["test"] = json!("image");
        object["width"] = json!(self.size.width);
        object["height"] = json!(self.size.height);
        object["tokens"] = json!(self.tokens);
        object["milliseconds"] = PARTS
            .iter()
            .enumerate()
            .map(|(part, name)| ((*name).to_owned(), json!(self.of_part(part))))
            .collect();
        object
    }

    /// Returns the head of the table.
    pub fn head() -> String {
        let parts: String = PARTS.iter().map(|part| format!("  {part:>8}")).collect();
        format!("{:12} {:>6}{parts}  {:>15}", "image", "tokens", "(min .. max)")
    }

    /// Returns a line of the table: medians in milliseconds, and the range of the sums.
    pub fn line(&self) -> String {
        let parts: String =
            (0..PARTS.len()).map(|part| format!("  {:>8.1}", median(self.of_part(part)))).collect();
        let all = self.of_part(PARTS.len() - 1);
        let (low, high) =
            (all.iter().copied().fold(f64::MAX, f64::min), all.iter().copied().fold(0.0, f64::max));
        let (size, tokens) = (self.size.to_string(), self.tokens);
        format!("{size:12} {tokens:>6}{parts}  {:>15}", format!("{low:.1} .. {high:.1}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_differ_and_have_their_size() {
        let (size, mut random) = ("40x24".parse().unwrap(), Random::new(1, 100));
        let [one, two] = [png(size, &mut random).unwrap(), png(size, &mut random).unwrap()];
        assert_ne!(one, two);
        let picture = decode(&one, &Limits::default()).unwrap();
        assert_eq!((picture.width, picture.height), (40, 24));
        assert_eq!(png(size, &mut Random::new(1, 100)).unwrap(), one);
        for wrong in ["", "40", "40x", "0x24", "40x99999", "-1x3"] {
            assert!(wrong.parse::<ImageSize>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn parts_add_up() {
        let ms = Duration::from_millis;
        let tower = EncoderTimes { patches: ms(2), steps: ms(30), rows: ms(5) };
        let times = ImageTimes { decode: ms(10), tower, prompt: ms(100) };
        assert_eq!(times.milliseconds(), [10.0, 2.0, 30.0, 5.0, 100.0, 147.0]);
    }
}
