//! `/openapi.json`: what the routes take and give, for programs. The parameters come from the table in `parameters`, so
//! that the document cannot disagree with the server.

use axum::{Json, response::IntoResponse};
use serde_json::{Map, Value, json};

use crate::parameters::{Endpoint, Handling, PARAMETERS};

pub(crate) async fn serve() -> impl IntoResponse {
    Json(document())
}

/// The whole document.
#[must_use]
pub fn document() -> Value {
    let mut paths = Map::new();
    for endpoint in Endpoint::ALL {
        paths.insert(endpoint.path().into(), json!({"post": generating(endpoint)}));
    }
    let mut count = generating(Endpoint::Messages);
    count["operationId"] = json!("count_tokens");
    count["responses"]["200"] = json_response(&json!({
        "type": "object", "required": ["input_tokens"], "properties": {"input_tokens": {"type": "integer", "minimum": 1}},
    }));
    paths.insert("/v1/messages/count_tokens".into(), json!({"post": count}));
    let id = json!({"name": "id", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}});
    let reading = |name: &str, parameters: Value, schema: &str| {
        let mut responses = json!({"200": json_response(&json!({"$ref": format!("#/components/schemas/{schema}")}))});
        add_errors(&mut responses, &[401, 403, 404, 405, 503], "Error");
        json!({"operationId": name, "parameters": parameters, "responses": responses})
    };
    paths.insert("/v1/models".into(), json!({"get": reading("list_models", json!([]), "Object")}));
    paths.insert("/v1/models/{id}".into(), json!({"get": reading("model", json!([id]), "Object")}));
    let stored = json!({
        "get": reading("stored_response", json!([id]), "Object"),
        "delete": reading("delete_response", json!([id]), "Object"),
    });
    paths.insert("/v1/responses/{id}".into(), stored);
    paths.insert("/troika/requests/{id}".into(), json!({"get": reading("request", json!([id]), "Object")}));
    let mut metrics = reading("metrics", json!([]), "Object");
    metrics["responses"]["200"] = json!({
        "description": "OpenMetrics text.", "content": {"application/openmetrics-text": {"schema": {"type": "string"}}},
    });
    paths.insert("/metrics".into(), json!({"get": metrics}));
    let mut health = reading("health", json!([]), "Health");
    health["security"] = json!([]);
    health["responses"]["503"] = json_response(&json!({"$ref": "#/components/schemas/Health"}));
    paths.insert("/health".into(), json!({"get": health}));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Troika",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The parts of OpenAI's and Anthropic's APIs that this server speaks.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": schemas(),
        },
    })
}

fn schemas() -> Value {
    let text = json!({"type": "string"});
    let maybe = json!({"type": ["string", "null"]});
    json!({
        "Object": {"type": "object"},
        "Health": {
            "type": "object",
            "required": ["status", "reason", "model", "queued", "running"],
            "properties": {
                "status": {"enum": ["ok", "degraded", "failed", "stopping"]},
                "reason": maybe, "model": text,
                "queued": {"type": "integer"}, "running": {"type": "integer"},
                "hybrid": maybe,
            },
        },
        "Error": {
            "type": "object", "required": ["error"],
            "properties": {"error": {
                "type": "object", "required": ["message", "type", "param", "code"],
                "properties": {"message": text, "type": text, "param": maybe, "code": maybe},
            }},
        },
        "AnthropicError": {
            "type": "object", "required": ["type", "error"],
            "properties": {
                "type": {"const": "error"},
                "error": {
                    "type": "object", "required": ["type", "message"], "properties": {"type": text, "message": text},
                },
            },
        },
    })
}

fn json_response(schema: &Value) -> Value {
    json!({"description": "The answer.", "content": {"application/json": {"schema": schema}}})
}

fn add_errors(responses: &mut Value, codes: &[u16], schema: &str) {
    for code in codes {
        responses[code.to_string()] = json!({
            "description": "An error, see docs/api.md.",
            "content": {"application/json": {"schema": {"$ref": format!("#/components/schemas/{schema}")}}},
        });
    }
}

fn generating(endpoint: Endpoint) -> Value {
    let required = match endpoint {
        Endpoint::Chat => json!(["messages"]),
        Endpoint::Completions => json!(["prompt"]),
        Endpoint::Messages => json!(["messages", "max_tokens"]),
        Endpoint::Responses => json!(["input"]),
    };
    let mut properties = Map::new();
    for row in PARAMETERS {
        let schema = match row.handling(endpoint) {
            Handling::Applied => schema_of(row.name, endpoint),
            Handling::NoOp => json!({"description": "Accepted, without effect."}),
            Handling::Only(values) => {
                let values = values.iter().filter_map(|value| serde_json::from_str::<Value>(value).ok());
                json!({"enum": values.chain([Value::Null]).collect::<Vec<_>>()})
            }
            Handling::Refused => continue,
        };
        properties.insert(row.name.into(), schema);
    }
    let schema = json!({
        "type": "object", "properties": properties, "required": required, "additionalProperties": false,
    });
    let (object, error) = match endpoint {
        Endpoint::Messages => ("Object", "AnthropicError"),
        _ => ("Object", "Error"),
    };
    let mut answer = json_response(&json!({"$ref": format!("#/components/schemas/{object}")}));
    answer["content"]["text/event-stream"] = json!({});
    let mut responses = json!({"200": answer});
    add_errors(&mut responses, &[400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 503], error);
    json!({
        "operationId": endpoint.path().trim_start_matches("/v1/").replace('/', "_"),
        "requestBody": {"required": true, "content": {"application/json": {"schema": schema, "example": example(endpoint)}}},
        "responses": responses,
    })
}

/// The least that the route answers.
fn example(endpoint: Endpoint) -> Value {
    let messages = json!([{"role": "user", "content": "Hello"}]);
    match endpoint {
        Endpoint::Chat => json!({"messages": messages, "max_completion_tokens": 16}),
        Endpoint::Completions => json!({"prompt": "fn main", "max_tokens": 16}),
        Endpoint::Messages => json!({"messages": messages, "max_tokens": 16}),
        Endpoint::Responses => json!({"input": "Hello", "max_output_tokens": 16}),
    }
}

/// What values an applied parameter may have, about.
fn schema_of(name: &str, endpoint: Endpoint) -> Value {
    let number = |min: f64, max: f64| json!({"type": ["number", "null"], "minimum": min, "maximum": max});
    let count = |max: u64| json!({"type": ["integer", "null"], "minimum": 1, "maximum": max});
    let texts = |items: Value| json!({"anyOf": [{"type": "string"}, {"type": "array", "items": items}]});
    match (name, endpoint) {
        ("temperature", _) => number(0.0, 2.0),
        ("top_p" | "min_p", _) => number(0.0, 1.0),
        ("frequency_penalty" | "presence_penalty", _) => number(-2.0, 2.0),
        ("repetition_penalty", _) => number(0.01, 100.0),
        ("timeout", _) => number(0.001, 86_400.0),
        ("service_tier", _) => json!({"enum": ["auto", "default", "flex", "priority", null]}),
        ("top_k", _) => json!({"type": ["integer", "null"], "minimum": -1}),
        ("seed", _) => json!({"type": ["integer", "null"]}),
        ("n", _) => count(16),
        ("max_tokens", Endpoint::Messages) => json!({"type": "integer", "minimum": 1}),
        ("max_tokens" | "max_completion_tokens" | "max_output_tokens", _) => count(1 << 53),
        ("top_logprobs", _) | ("logprobs", Endpoint::Completions) => {
            json!({"type": ["integer", "null"], "minimum": 0, "maximum": 20})
        }
        ("stream" | "echo" | "ignore_eos" | "logprobs" | "store" | "parallel_tool_calls", _) => {
            json!({"type": ["boolean", "null"]})
        }
        ("model" | "instructions" | "previous_response_id", _) => json!({"type": ["string", "null"]}),
        ("reasoning_effort", _) => {
            json!({"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", null]})
        }
        ("stop" | "stop_sequences" | "system", _) => json!({"type": ["string", "array", "null"]}),
        ("prompt", _) => texts(json!({"type": "integer", "minimum": 0})),
        ("input", _) => texts(json!({"type": "object"})),
        ("messages", _) => {
            let roles = match endpoint {
                Endpoint::Messages => json!(["user", "assistant"]),
                _ => json!(["system", "developer", "user", "assistant", "tool"]),
            };
            let part = json!({"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}});
            let content = json!({"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": part}]});
            json!({"type": "array", "minItems": 1, "items": {
                "type": "object", "required": ["role"], "properties": {"role": {"enum": roles}, "content": content},
            }})
        }
        ("tools", _) => json!({"type": ["array", "null"], "items": {"type": "object"}}),
        ("tool_choice", Endpoint::Chat | Endpoint::Responses) => json!({"type": ["string", "object", "null"]}),
        _ => json!({"type": ["object", "null"]}),
    }
}
