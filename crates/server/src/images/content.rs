//! Content of a message: its text, and the images in it.

use paguro_model::chat::PICTURE;

use super::Image;

/// Text and images of a message. [`PICTURE`] stands for each image in the text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parts {
    /// The text.
    pub text: String,
    /// The images, in their order.
    pub images: Vec<Image>,
}

impl Parts {
    /// Adds text of the client.
    pub fn push_text(&mut self, text: &str) {
        if text.contains(PICTURE) {
            self.text.push_str(&text.replace(PICTURE, ""));
        } else {
            self.text.push_str(text);
        }
    }

    /// Adds an image.
    pub fn push_image(&mut self, image: Image) {
        self.text.push(PICTURE);
        self.images.push(image);
    }

    /// Adds other parts.
    pub fn append(&mut self, other: Self) {
        self.text.push_str(&other.text);
        self.images.extend(other.images);
    }
}

impl From<String> for Parts {
    fn from(text: String) -> Self {
        let mut parts = Self::default();
        if text.contains(PICTURE) {
            parts.push_text(&text);
        } else {
            parts.text = text;
        }
        parts
    }
}
