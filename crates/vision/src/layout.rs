//! Text around and between the tokens of a picture.

use std::fmt::Write as _;

use crate::plan::Plan;

/// Form of the prompt around a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen 3.5: the template writes the tokens around.
    Qwen,
    /// Gemma 3.
    Gemma3,
    /// Gemma 4.
    Gemma4,
    /// Pixtral, Mistral 3.
    Pixtral,
    /// Idefics3, SmolVLM.
    Idefics3,
    /// InternVL.
    InternVl,
    /// LFM2-VL.
    Lfm2,
    /// GLM-4V: the template writes the tokens around.
    Glm4,
    /// PaddleOCR-VL: the template writes the tokens around.
    PaddleOcr,
    /// Kimi-VL: the template writes the tokens around.
    Kimi,
    /// Kimi K2.5: the template writes the tokens around.
    KimiK25,
}

/// A piece of the prompt of a picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Names of control tokens, and line ends.
    Text(String),
    /// This many image tokens.
    Image(usize),
}

impl Family {
    /// Returns the text that stands for a picture where a chat template has no place for one. `marker` is what templates
    /// of the family write.
    pub fn placeholder(self, marker: &str) -> String {
        match self {
            Self::Qwen => format!("<|vision_start|>{marker}<|vision_end|>"),
            Self::InternVl => format!("{marker}\n"),
            Self::Glm4 => format!("<|begin_of_image|>{marker}<|end_of_image|>"),
            Self::PaddleOcr => format!("<|IMAGE_START|>{marker}<|IMAGE_END|>"),
            Self::Kimi => format!("<|media_start|>image<|media_content|>{marker}<|media_end|>"),
            Self::KimiK25 => format!("<|media_begin|>image<|media_content|>{marker}<|media_end|>"),
            Self::Gemma3 | Self::Gemma4 | Self::Pixtral | Self::Idefics3 | Self::Lfm2 => marker.to_owned(),
        }
    }

    /// Returns the text with which a picture's marker is replaced.
    pub fn expansion(self, plan: &Plan) -> Vec<Piece> {
        let image = || Piece::Image(plan.tokens());
        let text = |text: &str| Piece::Text(text.to_owned());
        match self {
            Self::Qwen | Self::Glm4 | Self::PaddleOcr | Self::Kimi | Self::KimiK25 => vec![image()],
            Self::InternVl => vec![text("<img>"), image(), text("</img>")],
            Self::Lfm2 => lfm2(plan),
            Self::Gemma3 => vec![text("\n\n<start_of_image>"), image(), text("<end_of_image>\n\n")],
            Self::Gemma4 => vec![text("<|image>"), image(), text("<image|>")],
            Self::Pixtral => pixtral(plan),
            Self::Idefics3 => idefics(plan),
        }
    }
}

/// Rows of image tokens, with a break after each and an end after the last one.
fn pixtral(plan: &Plan) -> Vec<Piece> {
    let Some(part) = plan.parts.first() else { return Vec::new() };
    let rows = (1..=part.rows).flat_map(|row| {
        let end = if row == part.rows { "[IMG_END]" } else { "[IMG_BREAK]" };
        [Piece::Image(part.columns as usize), Piece::Text(end.to_owned())]
    });
    rows.collect()
}

/// Tiles with their places, then the whole picture.
fn lfm2(plan: &Plan) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut text = "<|image_start|>".to_owned();
    let mut parts = plan.parts.iter();
    if let Some(grid) = plan.tiles {
        for place in 0..grid.rows * grid.columns {
            let (row, column) = (place / grid.columns + 1, place % grid.columns + 1);
            let _ = write!(text, "<|img_row_{row}_col_{column}|>");
            pieces.push(Piece::Text(std::mem::take(&mut text)));
            pieces.extend(parts.next().map(|part| Piece::Image(part.tokens())));
        }
        text.push_str("<|img_thumbnail|>");
    }
    pieces.push(Piece::Text(text));
    pieces.extend(parts.next().map(|part| Piece::Image(part.tokens())));
    pieces.push(Piece::Text("<|image_end|>".to_owned()));
    pieces
}

/// Tiles with their places, then the whole picture.
fn idefics(plan: &Plan) -> Vec<Piece> {
    const AROUND: &str = "<fake_token_around_image>";
    let mut pieces = Vec::new();
    let mut text = String::new();
    let mut parts = plan.parts.iter();
    if let Some(grid) = plan.tiles {
        for row in 1..=grid.rows {
            for column in 1..=grid.columns {
                let _ = write!(text, "{AROUND}<row_{row}_col_{column}>");
                pieces.push(Piece::Text(std::mem::take(&mut text)));
                pieces.extend(parts.next().map(|part| Piece::Image(part.tokens())));
            }
            text.push('\n');
        }
        text.push('\n');
    }
    text.push_str(AROUND);
    text.push_str("<global-img>");
    pieces.push(Piece::Text(text));
    pieces.extend(parts.next().map(|part| Piece::Image(part.tokens())));
    pieces.push(Piece::Text(AROUND.to_owned()));
    pieces
}
