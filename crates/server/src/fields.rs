//! Members of a JSON object, taken out one by one so that what is left over can be refused.

use axum::http::StatusCode;
use serde_json::{Map, Value};

use crate::{
    error::{ApiError, quote},
    parameters::{Endpoint, Handling, PARAMETERS},
};

/// Members of a JSON object. `null` is as good as absent.
pub(crate) struct Fields {
    /// What precedes a member's name in errors.
    path: String,
    fields: Map<String, Value>,
}

impl Fields {
    /// A whole request body.
    pub(crate) fn of_body(body: &[u8]) -> Result<Self, ApiError> {
        let invalid = |message: String| ApiError::request(StatusCode::BAD_REQUEST, "invalid_json", message);
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self { path: String::new(), fields }),
            Ok(_) => Err(invalid("The request body must be a JSON object.".into())),
            Err(error) => Err(invalid(format!("The request body is not valid JSON: {error}"))),
        }
    }

    /// An object inside a body, at `path`, such as `messages[3]`.
    pub(crate) fn of(path: &str, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(fields) => Ok(Self { path: format!("{path}."), fields }),
            _ => Err(ApiError::invalid(path, format!("`{path}` must be an object."))),
        }
    }

    /// A member's name in errors.
    pub(crate) fn name(&self, name: &str) -> String {
        format!("{}{}", self.path, quote(name))
    }

    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    pub(crate) fn peek(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    /// Takes members out unseen.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.fields.remove(*name);
        }
    }

    /// Takes out lists without an entry: they ask for nothing.
    pub(crate) fn ignore_empty_lists(&mut self) {
        self.fields.retain(|_, value| !matches!(value, Value::Array(list) if list.is_empty()));
    }

    pub(crate) fn must_be(&self, name: &str, what: &str) -> ApiError {
        let name = self.name(name);
        let message = format!("`{name}` must be {what}.");
        ApiError::invalid(name, message)
    }

    pub(crate) fn require<T>(&self, name: &str, value: Option<T>) -> Result<T, ApiError> {
        value.ok_or_else(|| self.must_be(name, "given"))
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.must_be(name, "a text")),
        }
    }

    pub(crate) fn required_text(&mut self, name: &str) -> Result<String, ApiError> {
        let text = self.text(name)?;
        self.require(name, text)
    }

    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(_) => Err(self.must_be(name, "true or false")),
        }
    }

    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(_) => Err(self.must_be(name, "a list")),
        }
    }

    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        let path = self.name(name);
        self.take(name).map(|value| Self::of(&path, value)).transpose()
    }

    /// A number from `min` to `max`.
    pub(crate) fn number(&mut self, name: &str, min: f32, max: f32) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = in_range(&value, min, max);
        number.map(Some).ok_or_else(|| self.must_be(name, &format!("a number from {min} to {max}")))
    }

    /// A whole number from 1.
    pub(crate) fn count(&mut self, name: &str) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let count = whole(&value).filter(|count| *count > 0);
        count.map(Some).ok_or_else(|| self.must_be(name, "a whole number from 1 to 2^64 - 1"))
    }

    /// A whole number from 0 to `max`.
    pub(crate) fn count_to(&mut self, name: &str, min: usize, max: usize) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let count = whole(&value).filter(|count| (min..=max).contains(count));
        count.map(Some).ok_or_else(|| self.must_be(name, &format!("a whole number from {min} to {max}")))
    }

    pub(crate) fn unsupported(&self, name: &str) -> ApiError {
        let name = self.name(name);
        let message = format!("`{name}` is not supported with this value.");
        ApiError::request(StatusCode::BAD_REQUEST, "unsupported_value", message).about(name)
    }

    /// Refuses whatever is left.
    pub(crate) fn refuse_unknown(&self) -> Result<(), ApiError> {
        match self.fields.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let name = self.name(name);
                let message = format!("`{name}` is not supported.");
                Err(ApiError::request(StatusCode::BAD_REQUEST, "unsupported_parameter", message).about(name))
            }
        }
    }

    /// Refuses whatever is left, except what the table of parameters lets pass.
    pub(crate) fn refuse_the_rest(mut self, endpoint: Endpoint) -> Result<(), ApiError> {
        for row in PARAMETERS {
            match row.handling(endpoint) {
                Handling::Applied | Handling::Refused => {}
                Handling::NoOp => drop(self.take(row.name)),
                Handling::Only(allowed) => match self.take(row.name) {
                    Some(value) if !allowed.iter().any(|allowed| is_same(&value, allowed)) => {
                        return Err(self.unsupported(row.name));
                    }
                    _ => {}
                },
            }
        }
        self.refuse_unknown()
    }
}

/// The number, if it lies in the range.
pub(crate) fn in_range(value: &Value, min: f32, max: f32) -> Option<f32> {
    let range = f64::from(min)..=f64::from(max);
    #[expect(clippy::cast_possible_truncation, reason = "the range is checked before the value is used")]
    value.as_f64().filter(|number| range.contains(number)).map(|number| number as f32)
}

/// A whole number, also one written as `1.0`.
fn whole(value: &Value) -> Option<usize> {
    let float = || value.as_f64().filter(|number| number.fract() == 0.0 && (0.0..=1e15).contains(number));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole, and in range")]
    let count = value.as_u64().or_else(|| float().map(|number| number as u64))?;
    Some(usize::try_from(count).unwrap_or(usize::MAX))
}

/// Whether a value is that JSON; 0 and 0.0 are the same number.
fn is_same(value: &Value, json: &str) -> bool {
    serde_json::from_str(json).is_ok_and(|allowed: Value| match (value.as_f64(), allowed.as_f64()) {
        (Some(value), Some(allowed)) => value == allowed,
        _ => *value == allowed,
    })
}
